#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// Charts of the HTML report: inline SVG whose colours come from the page's CSS variables
/// --c1..--c3,
/// --ink, --muted and --grid. Every element with a value carries it as a <title>, which browsers
/// show as a tooltip.
namespace fovea::internal {

/// Text for HTML content and quoted attributes: & < > " ' are escaped; control characters and bytes
/// that are not UTF-8 become U+FFFD.
std::string html_escape(std::string_view text);

/// Three significant digits with thousands separators: "12,345", "0.0123"; "n/a" when not finite.
std::string number_text(double value);

/// "12,345".
std::string count_text(int64_t value);

/// "37.5 %"; "n/a" when not finite.
std::string percent_text(double share);

/// One value per bin; NaN: the bin has none.
struct ChartSeries {
  std::string name;
  int color = 1;  ///< 1..3
  std::vector<double> values;
};

enum class ChartStyle {
  kLines,         ///< One line per series, told apart by colour and dashes.
  kStackedAreas,  ///< Amounts that add up.
  kStackedBars,   ///< The same, bin by bin.
};

/// A line across the plot at a value of an axis.
struct ChartMark {
  double at = 0;
  std::string label;
};

/// Series over equal bins of [x_begin, x_end] (of log10 x with log_x).
struct BinnedChart {
  std::string title;    ///< What it shows, for readers who do not see it.
  std::string x_label;  ///< Axis title with unit.
  std::string y_label;
  std::string x_unit;  ///< For tooltips: "s".
  std::string y_unit;
  double x_begin = 0;
  double x_end = 1;
  bool log_x = false;
  ChartStyle style = ChartStyle::kLines;
  std::vector<ChartSeries> series;
  std::vector<ChartMark> x_marks;
  std::vector<ChartMark> y_marks;
};

/// A legend (with two or more series) and the chart; a sentence when there is nothing to draw.
std::string render_chart(const BinnedChart& chart);

struct ChartBar {
  std::string label;
  double value = 0;
  std::string value_text;  ///< Printed at the end of the bar.
};

/// Horizontal bars in the given order.
struct BarChart {
  std::string title;
  std::string x_label;
  std::vector<ChartBar> bars;
};

std::string render_bars(const BarChart& chart);

}  // namespace fovea::internal
