#pragma once

/// The style sheet of the HTML report. Colours c1..c3 differ in lightness as well as in hue, lines
/// also in their dashes, so that no reading depends on telling hues apart.
namespace fovea::internal {

inline constexpr char kReportStyle[] = R"css(
:root {
  color-scheme: light dark;
  --page: #f6f6f3; --card: #ffffff; --ink: #1d1d1b; --muted: #5c5b56; --grid: #e6e5e0; --edge: #d3d2cb;
  --c1: #1766a8; --c2: #e08214; --c3: #2aa188; --good: #1b7a3a; --bad: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #131312; --card: #1c1c1a; --ink: #ededea; --muted: #a8a69e; --grid: #2f2e2b; --edge: #43413c;
    --c1: #4f9be0; --c2: #f5a54a; --c3: #9be3a8; --good: #5fce83; --bad: #ff8a80;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 26px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 2px; }
p { margin: 0; }
.sub, .note { color: var(--muted); overflow-wrap: anywhere; }
.note { font-size: 13px; margin-bottom: 10px; }
.scale { margin: 16px 0 12px; padding: 10px 14px; background: var(--card); border: 1px solid var(--edge);
  border-left: 5px solid var(--c2); border-radius: 6px; }
.scale strong { font-size: 18px; }
.verdict { font-weight: 600; overflow-wrap: anywhere; }
.pass { color: var(--good); }
.fail { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(240px, 100%), 1fr)); gap: 12px; margin: 16px 0; }
.tile, .card { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; }
.tile { padding: 12px 14px; }
.tile .name { color: var(--muted); font-size: 13px; }
.tile .figure { font-size: 24px; font-weight: 600; line-height: 1.3; overflow-wrap: anywhere; }
.tile .unit { font-size: 14px; font-weight: 400; }
.tile .detail { color: var(--muted); font-size: 13px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(520px, 100%), 1fr)); gap: 14px; }
.card { padding: 14px 16px; min-width: 0; }
.wide { grid-column: 1 / -1; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: inherit; }
.tick { fill: var(--muted); font-size: 13px; font-variant-numeric: tabular-nums; }
.label { fill: var(--ink); font-size: 13.5px; }
.barlabel { fill: var(--ink); font-size: 13px; }
.grid { stroke: var(--grid); stroke-width: 1; }
.axis { stroke: var(--muted); stroke-width: 1; }
.mark { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 3 3; }
.marktext { fill: var(--ink); font-size: 13px; paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.s1 { stroke: var(--c1); } .s2 { stroke: var(--c2); stroke-dasharray: 6 3; }
.s3 { stroke: var(--c3); stroke-dasharray: 2 3; }
.f1 { fill: var(--c1); } .f2 { fill: var(--c2); } .f3 { fill: var(--c3); }
.area { stroke: var(--card); stroke-width: 1; }
.hit { fill: transparent; }
.hit:hover { fill: var(--ink); fill-opacity: 0.08; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 6px 0 2px; padding: 0; font-size: 13px; }
.legend li { display: flex; align-items: center; gap: 6px; }
.swatch { width: 22px; height: 10px; flex: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
th { font-weight: 600; color: var(--muted); white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.text { overflow-wrap: break-word; }
.mono { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 13px; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 6px 0; font-size: 14px; }
@media (min-width: 900px) { .wide dl { grid-template-columns: max-content 1fr max-content 1fr; } }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
.empty { color: var(--muted); padding: 24px 0; }
)css";

}  // namespace fovea::internal
