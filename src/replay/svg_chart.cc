#include "src/replay/svg_chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdio>

namespace fovea::internal {
namespace {

// The drawing area in SVG units; the page scales it to the width of its column.
constexpr double kWidth = 620;
constexpr double kHeight = 240;
constexpr double kLeft = 64;
constexpr double kRight = 14;
constexpr double kTop = 12;
constexpr double kBottom = 46;
constexpr double kMarkLine = 14;  // height of one line of mark labels above the plot

__attribute__((format(printf, 1, 2))) std::string print(const char* format, ...) {
  std::array<char, 1024> buffer;
  va_list arguments;
  va_start(arguments, format);
  const int length = std::vsnprintf(buffer.data(), buffer.size(), format, arguments);
  va_end(arguments);
  return std::string(buffer.data(), static_cast<size_t>(std::clamp<int>(length, 0, 1023)));
}

// Length of the UTF-8 sequence at the start of `text`; 0 when it is not a valid one.
size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const size_t length = first < 0x80   ? 1
                        : first < 0xC2 ? 0
                        : first < 0xE0 ? 2
                        : first < 0xF0 ? 3
                        : first < 0xF5 ? 4
                                       : 0;
  if (length == 0 || length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  // Overlong forms, surrogates and code points past U+10FFFF.
  if (first == 0xE0 && byte(1) < 0xA0) return 0;
  if (first == 0xED && byte(1) >= 0xA0) return 0;
  if (first == 0xF0 && byte(1) < 0x90) return 0;
  if (first == 0xF4 && byte(1) >= 0x90) return 0;
  return length;
}

// "1.2k", "340", "0.05": few characters, for ticks.
std::string tick_text(double value) {
  const double magnitude = std::fabs(value);
  if (magnitude >= 1e9) return print("%.4gG", value / 1e9);
  if (magnitude >= 1e6) return print("%.4gM", value / 1e6);
  if (magnitude >= 1e4) return print("%.4gk", value / 1e3);
  return print("%.4g", value);
}

// Multiples of 1, 2 or 5 times a power of ten in [begin, end], about `count` of them.
std::vector<double> linear_ticks(double begin, double end, int count) {
  const double rough = (end - begin) / count;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  const double digit = rough / power;
  const double step = power * (digit <= 1 ? 1 : digit <= 2 ? 2 : digit <= 5 ? 5 : 10);
  std::vector<double> ticks;
  for (double k = std::ceil(begin / step - 1e-9); k * step <= end + 1e-9 * step; ++k)
    ticks.push_back(k * step + 0.0);  // + 0.0 makes a negative zero positive
  return ticks;
}

// 1, 2 and 5 times the powers of ten inside [begin, end]; powers of ten alone over long ranges.
std::vector<double> log_ticks(double begin, double end) {
  const bool sparse = end / begin > 1e4;
  std::vector<double> ticks;
  for (double power = std::pow(10.0, std::floor(std::log10(begin))); power <= end; power *= 10) {
    for (const double digit : {1.0, 2.0, 5.0}) {
      if (sparse && digit != 1.0) continue;
      if (digit * power >= begin * (1 - 1e-9) && digit * power <= end * (1 + 1e-9))
        ticks.push_back(digit * power);
    }
  }
  return ticks;
}

// At most `max_characters` code points; a cut text ends in an ellipsis.
std::string shorten(const std::string& text, size_t max_characters) {
  size_t characters = 0, at = 0, cut = 0;
  while (at < text.size()) {
    if (++characters == max_characters) cut = at;
    at += std::max<size_t>(1, utf8_length(std::string_view(text).substr(at)));
  }
  return characters <= max_characters ? text : text.substr(0, cut) + "\xE2\x80\xA6";
}

size_t num_bins(const BinnedChart& chart) {
  size_t bins = 0;
  for (const ChartSeries& series : chart.series) bins = std::max(bins, series.values.size());
  return bins;
}

double value_at(const ChartSeries& series, size_t bin) {
  return bin < series.values.size() && std::isfinite(series.values[bin]) ? series.values[bin] : NAN;
}

// Where things are drawn: the plot's frame and the map from values to it.
class Frame {
 public:
  explicit Frame(const BinnedChart& chart) : chart_(chart), bins_(num_bins(chart)), top_(kTop) {
    if (!chart.x_marks.empty()) top_ += kMarkLine * static_cast<double>(chart.x_marks.size());
    double highest = 0;
    for (size_t bin = 0; bin < bins_; ++bin) {
      double sum = 0;
      for (const ChartSeries& series : chart.series) {
        const double value = std::isnan(value_at(series, bin)) ? 0 : value_at(series, bin);
        sum = chart.style == ChartStyle::kLines ? std::max(sum, value) : sum + value;
      }
      highest = std::max(highest, sum);
    }
    for (const ChartMark& mark : chart.y_marks) highest = std::max(highest, mark.at);
    // Room above the highest value, for the label of a mark too.
    y_end_ = highest > 0 ? (chart.y_marks.empty() ? 1.06 : 1.15) * highest : 1;
  }

  size_t bins() const { return bins_; }
  double top() const { return top_; }
  double bottom() const { return kHeight - kBottom; }
  double left() const { return kLeft; }
  double right() const { return kWidth - kRight; }
  double y_end() const { return y_end_; }

  double y(double value) const {
    return bottom() - (bottom() - top_) * std::clamp(value / y_end_, 0.0, 1.0);
  }
  /// Left edge of a bin; bins() gives the right edge of the last one.
  double bin_x(size_t bin) const {
    return left() + (right() - left()) * static_cast<double>(bin) / static_cast<double>(bins_);
  }
  double x(double value) const {
    const double position =
        chart_.log_x ? std::log(value / chart_.x_begin) / std::log(chart_.x_end / chart_.x_begin)
                     : (value - chart_.x_begin) / (chart_.x_end - chart_.x_begin);
    return left() + (right() - left()) * std::clamp(position, 0.0, 1.0);
  }
  double bin_begin(size_t bin) const {
    const double share = static_cast<double>(bin) / static_cast<double>(bins_);
    return chart_.log_x ? chart_.x_begin * std::pow(chart_.x_end / chart_.x_begin, share)
                        : chart_.x_begin + (chart_.x_end - chart_.x_begin) * share;
  }

 private:
  const BinnedChart& chart_;
  size_t bins_;
  double top_;
  double y_end_ = 1;
};

std::string open_svg(const std::string& title, double height) {
  return print("<svg viewBox=\"0 0 %g %g\" role=\"img\" aria-label=\"", kWidth, height) +
         html_escape(title) + "\">\n";
}

std::string axes(const BinnedChart& chart, const Frame& frame) {
  std::string svg;
  for (const double tick : linear_ticks(0, frame.y_end(), 4)) {
    svg += print("<line class=\"grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>",
                 frame.left(), frame.right(), frame.y(tick), frame.y(tick));
    svg += print("<text class=\"tick\" text-anchor=\"end\" x=\"%.1f\" y=\"%.1f\">%s</text>\n",
                 frame.left() - 7, frame.y(tick) + 4, tick_text(tick).c_str());
  }
  const std::vector<double> ticks = chart.log_x ? log_ticks(chart.x_begin, chart.x_end)
                                                : linear_ticks(chart.x_begin, chart.x_end, 7);
  for (const double tick : ticks) {
    svg += print("<line class=\"axis\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>",
                 frame.x(tick), frame.x(tick), frame.bottom(), frame.bottom() + 4);
    svg += print("<text class=\"tick\" text-anchor=\"middle\" x=\"%.1f\" y=\"%.1f\">%s</text>\n",
                 frame.x(tick), frame.bottom() + 17, tick_text(tick).c_str());
  }
  svg += print("<line class=\"axis\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>\n",
               frame.left(), frame.right(), frame.bottom(), frame.bottom());
  svg += print("<text class=\"label\" text-anchor=\"middle\" x=\"%.1f\" y=\"%.1f\">",
               (frame.left() + frame.right()) / 2, kHeight - 8) +
         html_escape(chart.x_label) + "</text>\n";
  const double middle = (frame.top() + frame.bottom()) / 2;
  svg += print(
             "<text class=\"label\" text-anchor=\"middle\" x=\"14\" y=\"%.1f\" "
             "transform=\"rotate(-90 14 %.1f)\">",
             middle, middle) +
         html_escape(chart.y_label) + "</text>\n";
  return svg;
}

// A line that stays level across each bin and stops where there is no value.
std::string line_path(const Frame& frame, const ChartSeries& series) {
  std::string path;
  bool drawing = false;
  for (size_t bin = 0; bin < frame.bins(); ++bin) {
    const double value = value_at(series, bin);
    if (std::isnan(value)) {
      drawing = false;
      continue;
    }
    path += drawing ? print("V%.1f", frame.y(value))
                    : print("M%.1f %.1f", frame.bin_x(bin), frame.y(value));
    path += print("H%.1f", frame.bin_x(bin + 1));
    drawing = true;
  }
  return path;
}

std::string draw_lines(const BinnedChart& chart, const Frame& frame) {
  std::string svg;
  for (const ChartSeries& series : chart.series) {
    svg +=
        print("<path class=\"line s%d\" d=\"", series.color) + line_path(frame, series) + "\"/>\n";
  }
  return svg;
}

// The outline of one layer of a stack: along its top and back along the layer below.
std::string draw_areas(const BinnedChart& chart, const Frame& frame) {
  std::string svg;
  std::vector<double> base(frame.bins(), 0.0);
  for (const ChartSeries& series : chart.series) {
    std::string path;
    std::vector<double> top = base;
    for (size_t bin = 0; bin < frame.bins(); ++bin) {
      if (!std::isnan(value_at(series, bin))) top[bin] += value_at(series, bin);
      path += bin == 0 ? print("M%.1f %.1f", frame.bin_x(bin), frame.y(top[bin]))
                       : print("V%.1f", frame.y(top[bin]));
      path += print("H%.1f", frame.bin_x(bin + 1));
    }
    for (size_t bin = frame.bins(); bin-- > 0;)
      path += print("V%.1fH%.1f", frame.y(base[bin]), frame.bin_x(bin));
    svg += print("<path class=\"area f%d\" d=\"", series.color) + path + "Z\"/>\n";
    base = top;
  }
  return svg;
}

std::string draw_stacked_bars(const BinnedChart& chart, const Frame& frame) {
  std::string svg;
  std::vector<double> base(frame.bins(), 0.0);
  const double width = frame.bin_x(1) - frame.bin_x(0);
  const double gap = width > 6 ? 2 : width > 3 ? 1 : 0;
  for (const ChartSeries& series : chart.series) {
    for (size_t bin = 0; bin < frame.bins(); ++bin) {
      const double value = value_at(series, bin);
      if (!(value > 0)) continue;
      const double y = frame.y(base[bin] + value);
      svg +=
          print("<rect class=\"f%d\" x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\"/>\n",
                series.color, frame.bin_x(bin) + gap / 2, y, width - gap, frame.y(base[bin]) - y);
      base[bin] += value;
    }
  }
  return svg;
}

// Lines first, then the labels, whose outline in the colour of the card covers lines behind them.
std::string draw_marks(const BinnedChart& chart, const Frame& frame) {
  std::string lines, labels;
  for (size_t i = 0; i < chart.x_marks.size(); ++i) {
    const ChartMark& mark = chart.x_marks[i];
    if (!std::isfinite(mark.at) || (chart.log_x && mark.at <= 0)) continue;
    const double x = frame.x(mark.at);
    const double label_y = kTop + kMarkLine * static_cast<double>(i) + 9;
    const bool flip = x > (frame.left() + frame.right()) / 2;
    lines += print("<line class=\"mark\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>\n", x, x,
                   label_y - 9, frame.bottom());
    labels += print("<text class=\"marktext\" text-anchor=\"%s\" x=\"%.1f\" y=\"%.1f\">",
                    flip ? "end" : "start", x + (flip ? -5 : 5), label_y) +
              html_escape(mark.label) + "</text>\n";
  }
  for (const ChartMark& mark : chart.y_marks) {
    if (!std::isfinite(mark.at)) continue;
    lines += print("<line class=\"mark\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>\n",
                   frame.left(), frame.right(), frame.y(mark.at), frame.y(mark.at));
    labels += print("<text class=\"marktext\" text-anchor=\"end\" x=\"%.1f\" y=\"%.1f\">",
                    frame.right() - 2, frame.y(mark.at) - 5) +
              html_escape(mark.label) + "</text>\n";
  }
  return lines + labels;
}

// Invisible columns, one a bin, that show every value of the bin.
std::string tooltips(const BinnedChart& chart, const Frame& frame) {
  std::string svg;
  for (size_t bin = 0; bin < frame.bins(); ++bin) {
    std::string text = number_text(frame.bin_begin(bin)) + " to " +
                       number_text(frame.bin_begin(bin + 1)) + " " + chart.x_unit;
    for (const ChartSeries& series : chart.series) {
      if (std::isnan(value_at(series, bin))) continue;
      text += "\n" + series.name + ": " + number_text(value_at(series, bin)) + " " + chart.y_unit;
    }
    svg += print("<rect class=\"hit\" x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\"><title>",
                 frame.bin_x(bin), frame.top(), frame.bin_x(bin + 1) - frame.bin_x(bin),
                 frame.bottom() - frame.top()) +
           html_escape(text) + "</title></rect>\n";
  }
  return svg;
}

std::string legend(const BinnedChart& chart) {
  if (chart.series.size() < 2) return {};
  std::string html = "<ul class=\"legend\">";
  for (const ChartSeries& series : chart.series) {
    html += "<li><svg class=\"swatch\" viewBox=\"0 0 22 10\" aria-hidden=\"true\">";
    html += chart.style == ChartStyle::kLines
                ? print("<path class=\"line s%d\" d=\"M0 5H22\"/>", series.color)
                : print("<rect class=\"f%d\" width=\"22\" height=\"10\"/>", series.color);
    html += "</svg>" + html_escape(series.name) + "</li>";
  }
  return html + "</ul>\n";
}

}  // namespace

std::string html_escape(std::string_view text) {
  std::string html;
  html.reserve(text.size());
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    const char c = text.front();
    if (length == 0 || (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') ||
        c == 0x7F) {
      html += "\xEF\xBF\xBD";  // U+FFFD
    } else if (c == '&') {
      html += "&amp;";
    } else if (c == '<') {
      html += "&lt;";
    } else if (c == '>') {
      html += "&gt;";
    } else if (c == '"') {
      html += "&quot;";
    } else if (c == '\'') {
      html += "&#39;";
    } else {
      html += text.substr(0, length);
    }
    text.remove_prefix(std::max<size_t>(1, length));
  }
  return html;
}

std::string count_text(int64_t value) {
  std::string digits = std::to_string(value);
  for (size_t i = digits.size(); i > (value < 0 ? 4u : 3u);) {
    i -= 3;
    digits.insert(i, ",");
  }
  return digits;
}

std::string number_text(double value) {
  if (!std::isfinite(value)) return "n/a";
  // From 100 on every digit before the point is shown, so that totals can be compared.
  if (std::fabs(value) >= 1e15) return print("%.3g", value);
  if (std::fabs(value) >= 99.95) return count_text(std::llround(value));
  return print("%.3g", value);
}

std::string percent_text(double share) {
  if (!std::isfinite(share)) return "n/a";
  return print("%.1f %%", 100 * share);
}

std::string render_chart(const BinnedChart& chart) {
  const Frame frame(chart);
  const bool x_is_a_range =
      chart.log_x ? chart.x_begin > 0 && chart.x_end > chart.x_begin : chart.x_end > chart.x_begin;
  if (frame.bins() == 0 || !x_is_a_range || !std::isfinite(chart.x_begin) ||
      !std::isfinite(chart.x_end)) {
    return "<p class=\"empty\">Nothing to show.</p>\n";
  }
  std::string html = legend(chart) + open_svg(chart.title, kHeight) + axes(chart, frame);
  switch (chart.style) {
    case ChartStyle::kLines:
      html += draw_lines(chart, frame);
      break;
    case ChartStyle::kStackedAreas:
      html += draw_areas(chart, frame);
      break;
    case ChartStyle::kStackedBars:
      html += draw_stacked_bars(chart, frame);
      break;
  }
  return html + draw_marks(chart, frame) + tooltips(chart, frame) + "</svg>\n";
}

std::string render_bars(const BarChart& chart) {
  double highest = 0;
  for (const ChartBar& bar : chart.bars) {
    if (std::isfinite(bar.value)) highest = std::max(highest, bar.value);
  }
  if (chart.bars.empty() || highest <= 0) return "<p class=\"empty\">Nothing to show.</p>\n";
  constexpr double kBarStep = 27, kBarHeight = 15, kLabelWidth = 190, kValueWidth = 150;
  const double height = kBarStep * static_cast<double>(chart.bars.size()) + 40;
  const double plot = kWidth - kLabelWidth - kValueWidth;
  std::string svg = open_svg(chart.title, height);
  for (const double tick : linear_ticks(0, highest, 4)) {
    const double x = kLabelWidth + plot * tick / highest;
    svg += print("<line class=\"grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"4\" y2=\"%.1f\"/>", x, x,
                 height - 36);
    svg += print("<text class=\"tick\" text-anchor=\"middle\" x=\"%.1f\" y=\"%.1f\">%s</text>\n", x,
                 height - 23, tick_text(tick).c_str());
  }
  double y = 6;
  for (const ChartBar& bar : chart.bars) {
    const double width = std::isfinite(bar.value) ? plot * std::max(0.0, bar.value) / highest : 0;
    svg += "<g><title>" + html_escape(bar.label + ": " + bar.value_text) + "</title>";
    svg += print("<text class=\"barlabel\" text-anchor=\"end\" x=\"%.1f\" y=\"%.1f\">",
                 kLabelWidth - 8, y + 12) +
           html_escape(shorten(bar.label, 28)) + "</text>";
    svg += print("<rect class=\"f1\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"/>",
                 kLabelWidth, y, std::max(1.0, width), kBarHeight);
    svg +=
        print("<text class=\"barlabel\" x=\"%.1f\" y=\"%.1f\">", kLabelWidth + width + 7, y + 12) +
        html_escape(bar.value_text) + "</text></g>\n";
    y += kBarStep;
  }
  svg += print("<text class=\"label\" text-anchor=\"middle\" x=\"%.1f\" y=\"%.1f\">",
               kLabelWidth + plot / 2, height - 6) +
         html_escape(chart.x_label) + "</text>\n";
  return svg + "</svg>\n";
}

}  // namespace fovea::internal
