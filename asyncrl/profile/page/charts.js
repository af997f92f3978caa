"use strict";
/* The charts: each function turns a part of the document (asyncrl/profile/report.py) into an ECharts option, without drawing. */

const PALETTES = {
  light: {
    ink: "#1b2330", dim: "#5c6778", rule: "#e3e7ee", card: "#ffffff", learner: "#2563c9", fleet: "#0f8f7e", mark: "#1b2330",
    here: "#d0342c", bound: "#d0342c",
    causes: ["#e8a33d", "#d9603b", "#8f6bd1", "#c4508f", "#9aa5b5", "#6d8f3a", "#b8894d", "#4aa3c7", "#c9b72e", "#7d5a4b", "#e08a9b", "#5b6fb0", "#a3c26b", "#b05a5a", "#57b79b", "#c58bd9", "#8a8a3c", "#d4a5c9", "#4f7f8c", "#f2c1a0"],
  },
  dark: {
    ink: "#e6eaf1", dim: "#98a4b6", rule: "#2a323f", card: "#1a202a", learner: "#5b93f0", fleet: "#35b8a3", mark: "#e6eaf1",
    here: "#ff7a70", bound: "#ff7a70",
    causes: ["#f0b357", "#e77c58", "#a98ae6", "#dc74ad", "#707c8e", "#8fb356", "#cfa267", "#6bbfe0", "#d8c94d", "#a07c6c", "#eda6b4", "#8395d6", "#b9d485", "#cf7c7c", "#6fcbb0", "#d7a3e8", "#b3b35a", "#e3bfda", "#79aab8", "#f6d3ba"],
  },
};

const seconds = (value) => value >= 100 ? `${value.toFixed(0)} s` : value >= 1 ? `${value.toFixed(2)} s` : `${(1000 * value).toFixed(value < 0.1 ? 1 : 0)} ms`;
const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;
const safe = (text) => echarts.format.encodeHTML(String(text));

function clock(milliseconds) {
  const total = milliseconds / 1000, whole = Math.floor(total);
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  const fraction = total === whole ? "" : (total - whole).toFixed(2).slice(1).replace(/0$/, "");
  const rest = String(whole % 60).padStart(2, "0") + fraction;
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

/** Whether a long legend or two charts side by side have no room. */
const isNarrow = () => innerWidth < 900;
/** Symbol of a line's points: a line through one point is invisible without it. */
const symbolOf = (points) => points.length > 1 ? "none" : "circle";

/** Options of all charts: fonts, grid lines, the tooltip. */
function base(palette, overrides) {
  return {
    animation: false, useUTC: true, aria: { enabled: true }, backgroundColor: "transparent",
    textStyle: { color: palette.ink, fontFamily: "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif" },
    tooltip: { trigger: "axis", confine: true, backgroundColor: palette.card, borderColor: palette.rule, textStyle: { color: palette.ink, fontSize: 12 } },
    legend: { type: isNarrow() ? "scroll" : "plain", icon: "roundRect", top: 0, left: 0, right: 0, itemWidth: 12, itemHeight: 10, itemGap: 14, textStyle: { color: palette.ink, fontSize: 12 }, inactiveColor: palette.dim },
    ...overrides,
  };
}

function axis(palette, overrides) {
  const { axisLabel, ...rest } = overrides;
  return {
    nameTextStyle: { color: palette.dim, fontSize: 12 }, axisLine: { show: false }, axisTick: { show: false },
    axisLabel: { color: palette.dim, fontSize: 11, hideOverlap: true, ...axisLabel },
    splitLine: { lineStyle: { color: palette.rule } }, ...rest,
  };
}

const below = (palette, name, overrides = {}) => axis(palette, { name, nameLocation: "middle", nameGap: 26, splitLine: { show: false }, ...overrides });
const beside = (palette, name, overrides = {}) => axis(palette, { name, nameLocation: "middle", nameGap: 46, ...overrides });
const inside = (indices) => [{ type: "inside", xAxisIndex: indices, filterMode: "none", minSpan: 0.02 }];
const exact = { outerBoundsMode: "none" };  // keep the grids at their positions, so that bands line up
const listed = (rows) => rows.map(([marker, name, value]) => `${marker}${safe(name)} <b style="float:right;margin-left:1.5em">${value}</b>`).join("<br>");

/** Colour of each cause; a cause has the same colour in every chart. */
function colours(document, palette) {
  return Object.fromEntries(document.causes.map((cause, index) => [cause, palette.causes[index % palette.causes.length]]));
}

function timeline(document, palette) {
  const part = document.timeline, of = colours(document, palette);
  const at = (index) => Math.round(1000 * index * part.width_s);
  const points = (values) => [...values, values.at(-1)].map((value, index) => [at(index), value]);
  const area = (pool, grid, name, values, color, opacity) => ({
    name, type: "line", stack: pool, xAxisIndex: grid, yAxisIndex: grid, symbol: "none", data: values,
    lineStyle: { width: 0 }, itemStyle: { color }, areaStyle: { color, opacity }, emphasis: { disabled: true },
  });
  // Two points at each change of any band: ECharts' own steps leave gaps between stacked areas.
  const squared = (bands) => {
    const last = bands[0].length - 1;
    const changes = bands[0].flatMap((_, index) => index === 0 || bands.some((band) => band[index] !== band[index - 1]) ? [index] : []);
    return bands.map((band) => changes.flatMap((index, place) => [[at(index), band[index]], [at((changes[place + 1] ?? last + 1)), band[index]]]));
  };
  const pools = ["learner", "fleet"].flatMap((pool, grid) => {
    const causes = Object.keys(part[pool].idle), [busy, ...idle] = squared([part[pool].busy, ...Object.values(part[pool].idle)]);
    return [
      area(pool, grid, `${pool} at work`, busy, palette[pool], 0.95),
      ...causes.map((cause, index) => area(pool, grid, cause, idle[index], of[cause], 0.6)),
    ];
  });
  const level = (name, grid, values, color) => ({
    name, type: "line", step: "end", xAxisIndex: grid, yAxisIndex: grid, symbol: "none", data: points(values),
    lineStyle: { width: 1.5, color }, itemStyle: { color }, emphasis: { disabled: true },
  });
  const ticks = {
    name: "weights published", type: "scatter", xAxisIndex: 1, yAxisIndex: 1, symbol: "triangle", symbolSize: 7, symbolOffset: [0, -5],
    data: part.publishes.map(([time, version]) => ({ value: [Math.round(1000 * time), 1], version })), itemStyle: { color: palette.mark },
    clip: false, tooltip: { trigger: "item", formatter: (at) => `version ${at.data.version} served by every engine at ${clock(at.data.value[0])}` },
  };
  const series = [
    ...pools, ticks, level("stored groups", 2, part.stored, palette.learner), level("groups in flight", 2, part.in_flight, palette.fleet),
    level("mean lag of the batch", 3, part.lag, palette.here),
  ];
  const tops = [64, 204, 372, 486], heights = [118, 140, 88, 76];
  const span = { min: at(0), max: at(part.learner.busy.length) };
  const xAxis = tops.map((_, grid) => axis(palette, {
    type: "time", gridIndex: grid, ...span, splitLine: { show: false }, axisPointer: { show: true, label: { show: false } },
    axisLabel: { show: grid === 3, formatter: clock },
  }));
  const names = [`learner (${part.learner.capacity})`, `fleet (${part.fleet.capacity})`, "groups", "lag"];
  const yAxis = names.map((name, grid) => axis(palette, {
    name, gridIndex: grid, nameLocation: "middle", nameGap: 40, min: 0, ...(grid < 2 ? { max: 1, interval: 0.5 } : { splitNumber: 2, minInterval: grid === 2 ? 1 : 0 }),
    axisLabel: grid < 2 ? { formatter: percent } : {},
  }));
  const shown = (items) => {
    const rows = items.filter((item) => item.seriesType === "line" && item.value[1] > 0.0005);
    const index = (item) => item.seriesName.match(/stored|in flight/) ? item.value[1].toFixed(0) : item.seriesName.match(/mean lag/) ? item.value[1].toFixed(2) : percent(item.value[1]);
    return `${clock(items[0].value[0])}<br>${listed(rows.map((item) => [item.marker, `${item.axisIndex === 0 && !item.seriesName.startsWith("learner") ? "learner: " : item.axisIndex === 1 && !item.seriesName.startsWith("fleet") ? "fleet: " : ""}${item.seriesName}`, index(item)]))}`;
  };
  const options = base(palette, { grid: tops.map((top, grid) => ({ ...exact, left: 64, right: 18, top, height: heights[grid] })), xAxis, yAxis, series });
  options.axisPointer = { link: [{ xAxisIndex: "all" }], lineStyle: { color: palette.dim } };
  options.tooltip.formatter = shown;
  options.dataZoom = [...inside([0, 1, 2, 3]), {
    type: "slider", xAxisIndex: [0, 1, 2, 3], filterMode: "none", bottom: 2, height: 18, left: 64, right: 18, labelFormatter: clock,
    borderColor: palette.rule, textStyle: { color: palette.dim }, showDataShadow: false, brushSelect: true,
  }];
  return options;
}

function steps(document, palette) {
  const part = document.steps, of = colours(document, palette);
  const bar = (name, data, color, opacity) => ({ name, type: "bar", stack: "step", data, itemStyle: { color, opacity }, barCategoryGap: "12%", emphasis: { disabled: true } });
  const series = [
    bar("learner at work", part.busy_s, palette.learner, 1),
    ...Object.entries(part.idle_s).map(([cause, values]) => bar(cause, values, of[cause], 0.75)),
    { name: "fleet's work per batch", type: "line", step: "middle", data: part.fleet_s, symbol: symbolOf(part.fleet_s), lineStyle: { color: palette.mark, width: 2 }, itemStyle: { color: palette.mark } },
  ];
  const options = base(palette, {
    grid: { ...exact, left: 64, right: 18, top: 58, bottom: 42 }, series, dataZoom: inside([0]),
    xAxis: below(palette, "learner step", { type: "category", data: part.labels }), yAxis: beside(palette, "seconds", { type: "value" }),
  });
  options.tooltip.formatter = (items) => `step ${safe(items[0].axisValue)}<br>${listed(items.filter((item) => item.value > 0).map((item) => [item.marker, item.seriesName, seconds(item.value)]))}`;
  return options;
}

function fill(document, palette) {
  const part = document.fill;
  const line = (curve, data, color, opacity, width, name) => ({
    name, type: "line", data, symbol: "none", lineStyle: { color, opacity, width }, itemStyle: { color }, z: width, emphasis: { disabled: true },
    tooltip: { show: false },
  });
  const series = part.curves.flatMap((curve) => [
    line(curve, curve.points.slice(0, curve.tail + 1), palette.learner, 0.45, 1.2, "all but the last 5%"),
    line(curve, curve.points.slice(curve.tail), palette.here, 0.9, 2, "last 5% of the batch"),
  ]);
  const options = base(palette, {
    grid: { ...exact, left: 64, right: 18, top: 30, bottom: 42 }, series, dataZoom: inside([0]),
    xAxis: below(palette, "seconds until the batch is complete", { type: "value", max: 0, axisLabel: { formatter: (value) => value.toPrecision(3).replace(/\.?0+$/, "") } }),
    yAxis: beside(palette, "share stored", { type: "value", min: 0, max: 1, axisLabel: { formatter: percent } }),
  });
  options.tooltip = { show: false };
  return options;
}

function lag(document, palette) {
  const part = document.lag;
  const bar = (name, data, color) => ({ name, type: "bar", stack: "lag", data, itemStyle: { color }, barCategoryGap: "25%", emphasis: { disabled: true } });
  const bound = { silent: true, symbol: "none", data: [{ xAxis: String(part.bound) }], lineStyle: { color: palette.bound, type: "dashed", width: 2 }, label: { formatter: `bound ${part.bound}`, color: palette.bound } };
  const options = base(palette, {
    grid: { ...exact, left: 64, right: 40, top: 46, bottom: 42 },
    xAxis: below(palette, "lag (learner steps)", { type: "category", data: part.lags.map(String) }), yAxis: beside(palette, "groups", { type: "value", minInterval: 1 }),
    series: [
      { ...bar("without lag", part.none, palette.causes[4]), markLine: bound },
      bar("arose before the buffer", part.before, palette.fleet), bar("arose in the buffer", part.in_queue, palette.learner),
    ],
  });
  options.tooltip.formatter = (items) => `lag ${safe(items[0].axisValue)}<br>${listed(items.filter((item) => item.value > 0).map((item) => [item.marker, item.seriesName, `${+item.value.toFixed(1)} groups`]))}`;
  return options;
}

function frontier(document, palette) {
  const part = document.frontier, hues = [palette.learner, palette.fleet, ...palette.causes];
  const curves = part.curves.map((curve, index) => ({
    name: curve.name, type: "line", symbol: "circle", symbolSize: 8, lineStyle: { width: 1.5 }, itemStyle: { color: hues[index % hues.length] },
    data: curve.points.map((point) => ({ value: [point.lag, point.step_s], point })), label: { show: true, position: "top", color: palette.dim, fontSize: 11, formatter: (dot) => dot.data.point.max_lag },
  }));
  const here = { name: "you are here", type: "scatter", symbol: "diamond", symbolSize: 16, itemStyle: { color: palette.here }, z: 9, data: part.here ? [[part.here.lag, part.here.step_s]] : [], label: { show: true, position: "right", formatter: "you are here", color: palette.here } };
  const options = base(palette, {
    grid: { ...exact, left: 64, right: 90, top: 46, bottom: 42 }, series: [...curves, here], dataZoom: inside([0]),
    xAxis: below(palette, "mean lag (learner steps)", { type: "value", scale: true }), yAxis: beside(palette, "seconds per step", { type: "value", scale: true }),
  });
  options.tooltip.trigger = "item";
  options.tooltip.formatter = ({ seriesName, value, data }) => {
    const point = data.point, low = point?.interval ? ` (${seconds(point.interval[0])} to ${seconds(point.interval[1])})` : "";
    return `${safe(seriesName)}${point ? `, max_lag ${point.max_lag}` : ""}<br>${seconds(value[1])} per step${low}, mean lag ${value[0].toFixed(2)}`;
  };
  return options;
}

function lengths(document, palette) {
  const part = document.lengths;
  const kind = (name, color, width, type) => ({ name, type: "line", step: "end", data: [...part[name], part[name].at(-1)].map((value, index) => [part.edges[index], value]), symbol: "none", lineStyle: { color, width, type }, itemStyle: { color }, areaStyle: name === "generated" ? { color, opacity: 0.18 } : undefined, emphasis: { disabled: true } });
  return base(palette, {
    grid: { ...exact, left: 74, right: 18, top: 30, bottom: 42 }, dataZoom: inside([0]),
    series: [kind("generated", palette.causes[4], 1, "solid"), kind("trained", palette.learner, 2, "solid"), kind("dropped", palette.here, 2, "dashed")].filter((series) => part[series.name].some((value) => value > 0)),
    xAxis: below(palette, "response length (tokens)", { type: "value", min: part.edges[0], max: part.edges.at(-1) }), yAxis: beside(palette, "samples", { type: "value", minInterval: 1, nameGap: 54 }),
  });
}

function publishes(document, palette) {
  const part = document.publishes, names = part.stages.map((stage) => stage.name), hues = [palette.learner, palette.learner, ...palette.causes];
  const rows = {
    name: "median publish", type: "bar", stack: "stage", xAxisIndex: 0, yAxisIndex: 0, barMaxWidth: 20, emphasis: { disabled: true }, legendHoverLink: false,
    data: part.stages.map((stage) => ({ value: stage.end_s - stage.start_s, stage, itemStyle: { color: stage.side === "learner" ? palette.learner : stage.pauses ? palette.here : palette.fleet } })),
    label: { show: true, position: "right", color: palette.dim, fontSize: 11, formatter: ({ data }) => seconds(data.value) },
  };
  const offset = { type: "bar", stack: "stage", xAxisIndex: 0, yAxisIndex: 0, silent: true, itemStyle: { color: "transparent" }, data: part.stages.map((stage) => stage.start_s), tooltip: { show: false } };
  const total = { name: "from copy to the last engine", type: "line", xAxisIndex: 1, yAxisIndex: 1, symbol: symbolOf(part.versions), data: part.versions.map((version, index) => [version, part.total_s[index]]), lineStyle: { color: palette.fleet }, itemStyle: { color: palette.fleet } };
  const pause = { name: "engines paused", type: "line", xAxisIndex: 1, yAxisIndex: 1, symbol: symbolOf(part.versions), data: part.versions.map((version, index) => [version, part.pause_s[index]]), lineStyle: { color: palette.here }, itemStyle: { color: palette.here } };
  const options = base(palette, {
    grid: isNarrow()
      ? [{ ...exact, left: 130, right: 60, top: 22, height: 96 }, { ...exact, left: 64, right: 18, top: 200, bottom: 42 }]
      : [{ ...exact, left: 130, width: "38%", top: 34, bottom: 42 }, { ...exact, left: "62%", right: 18, top: 34, bottom: 42 }],
    series: [offset, rows, total, pause],
    legend: { data: [total.name, pause.name], right: 18, top: isNarrow() ? 156 : 0, textStyle: { color: palette.ink, fontSize: 12 } }, dataZoom: inside([1]),
    title: { text: "median over the versions", left: 130, top: 2, textStyle: { color: palette.dim, fontSize: 12, fontWeight: "normal" } },
    xAxis: [below(palette, "seconds since the copy began", { type: "value" }), below(palette, "policy version", { type: "value", gridIndex: 1, scale: true, minInterval: 1 })],
    yAxis: [axis(palette, { type: "category", data: names, inverse: true, splitLine: { show: false } }), beside(palette, "seconds", { type: "value", gridIndex: 1 })],
  });
  options.tooltip.trigger = "item";
  options.tooltip.formatter = ({ seriesName, value, data }) => data.stage
    ? `${safe(data.stage.name)}: ${seconds(data.stage.start_s)} to ${seconds(data.stage.end_s)}${data.stage.pauses ? ", the engine is paused" : ""}`
    : `version ${value[0]}<br>${safe(seriesName)} ${seconds(value[1])}`;
  return options;
}

const CHARTS = { timeline, steps, fill, lag, frontier, lengths, publishes };
