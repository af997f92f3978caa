"use strict";
/* The page: draws the document into the sections, and redraws it when the theme changes or a live run sends an event. */

const element = (id) => document.getElementById(id);
const drawn = {};
let report = null;

function make(tag, text, properties = {}) {
  const node = Object.assign(document.createElement(tag), properties);
  if (text !== undefined) node.textContent = text;
  return node;
}

function theme() {
  return document.documentElement.dataset.theme;
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  if (report) draw(report);
}

/** Draws one chart, or shows why it is missing. */
function drawChart(name, option) {
  const place = element(name), reason = report.absent[name];
  let note = place.parentElement.querySelector(".absent");
  if (reason) {
    drawn[name]?.dispose();
    delete drawn[name];
    place.hidden = true;
    note ??= place.parentElement.appendChild(make("p", "", { className: "absent" }));
    note.textContent = reason;
    return;
  }
  note?.remove();
  place.hidden = false;
  const chart = drawn[name] ??= echarts.init(place);
  const zoom = chart.getOption()?.dataZoom?.map(({ start, end }) => ({ start, end }));
  option.dataZoom?.forEach((entry, index) => Object.assign(entry, zoom?.[index]));
  place.setAttribute("aria-label", place.parentElement.querySelector("h2").textContent);
  place.setAttribute("role", "group");
  chart.setOption(option, { notMerge: true });
}

function drawMembers(members) {
  const table = element("members");
  element("section-members").hidden = !members.rows.length;
  const head = make("tr"), body = members.rows.map((row) => {
    const line = make("tr");
    line.append(...row.map((cell) => make("td", cell)));
    return line;
  });
  head.append(...members.columns.map((name) => make("th", name)));
  table.replaceChildren(make("thead"), make("tbody"));
  table.firstChild.append(head);
  table.lastChild.append(...body);
}

const ORDERS = {
  newest: (sample) => -sample.newest_version, worst: (sample) => sample.reward, best: (sample) => -sample.reward,
  longest: (sample) => -sample.num_tokens,
  apart: (sample) => -Math.max(0, ...(sample.tokens ?? []).map((token) => Math.abs(token.difference ?? 0))),
};
const VERSION_SCALE = ["#9ecae9", "#a6dbb0", "#f7d488", "#f4b8a0", "#d3b6e6", "#c9d5a0"];
const FULL_COLOUR_NATS = 0.5;

/** Background of a token by its policy version, or by the engine's minus the learner's log-prob; null if unknown. */
function tokenColour(token, by) {
  if (by === "version") return token.version < 0 ? null : VERSION_SCALE[token.version % VERSION_SCALE.length];
  if (token.difference === null || token.difference === undefined) return null;
  const strength = Math.min(1, Math.abs(token.difference) / FULL_COLOUR_NATS);
  return `color-mix(in srgb, ${token.difference > 0 ? "#f28e5c" : "#6ba6e8"} ${Math.round(100 * strength)}%, #f3f4f6)`;
}

function tokenSpan(token, by) {
  const colour = tokenColour(token, by);
  const apart = token.difference === null || token.difference === undefined ? "" : `, engine − learner ${token.difference.toFixed(3)} nats`;
  const node = make("i", token.text, { title: `version ${token.version < 0 ? "none: not sampled" : token.version}${apart}` });
  if (colour) node.style.background = colour;
  else node.className = "plain";
  return node;
}

function sampleCard(sample, by) {
  const card = make("article", undefined, { className: "sample" }), text = make("pre");
  const versions = sample.oldest_version === sample.newest_version ? `version ${sample.newest_version}` : `versions ${sample.oldest_version} to ${sample.newest_version}`;
  const truth = sample.ground_truth ? `, ground truth ${sample.ground_truth}` : "";
  card.append(make("p", `${sample.kind}, group ${sample.group_id}, ${versions}, reward ${sample.reward.toFixed(3)}, ${sample.num_tokens} tokens, ${sample.finish_reason}${truth}`));
  text.append(make("span", sample.prompt, { className: "prompt" }));
  if (sample.tokens) text.append(...sample.tokens.map((token) => tokenSpan(token, by)));
  else text.append(sample.response);
  card.append(text);
  return card;
}

function drawSamples() {
  const form = element("sample-options"), place = element("samples"), reason = report.absent.samples;
  form.hidden = Boolean(reason);
  if (reason) return place.replaceChildren(make("p", reason, { className: "absent" }));
  const kinds = [...new Set(report.samples.map((sample) => sample.kind))], select = form.elements.kind;
  if (select.options.length !== kinds.length + 1) select.replaceChildren(make("option", "all", { value: "" }), ...kinds.map((kind) => make("option", kind, { value: kind })));
  const kept = report.samples.filter((sample) => !select.value || sample.kind === select.value), by = form.elements.colour.value;
  kept.sort((left, right) => ORDERS[form.elements.order.value](left) - ORDERS[form.elements.order.value](right));
  const scale = by === "version"
    ? [...new Set(kept.flatMap((sample) => (sample.tokens ?? []).map((token) => token.version)))].filter((version) => version >= 0).sort((left, right) => left - right).slice(-8).map((version) => ({ version, text: `v${version}` }))
    : [-FULL_COLOUR_NATS, 0, FULL_COLOUR_NATS].map((difference) => ({ difference, version: -1, text: `${difference > 0 ? "+" : ""}${difference} nats` }));
  element("sample-scale").replaceChildren(...scale.map((token) => tokenSpan(token, by)));
  place.replaceChildren(...kept.slice(0, 60).map((sample) => sampleCard(sample, by)));
}

/** Colour of each reason for which an episode waits. */
function waitColours() {
  const palette = PALETTES[theme()];
  return { generation: palette.fleet, queue: palette.causes[0], tool: palette.causes[2], environment: palette.causes[4] };
}

/** Draws periods of an episode as bars on one line; its whole width is `duration`. */
function waitTrack(bars, duration) {
  const track = make("div", undefined, { className: "track" }), colours = waitColours();
  track.append(...bars.map(([what, start, end]) => {
    const bar = make("b", undefined, { title: `${what} ${seconds(end - start)}, from ${seconds(start)} to ${seconds(end)}` });
    Object.assign(bar.style, { left: `${100 * start / duration}%`, width: `${100 * (end - start) / duration}%`, background: colours[what] });
    return bar;
  }));
  return track;
}

function episodeRow(row, duration) {
  const name = make("span", undefined, { className: "name" }), reward = row.reward;
  name.style.paddingLeft = `${1.1 * Math.min(row.indent, 12) + (row.kind === "tool" ? 1.1 : 0)}em`;
  const title = row.kind === "tool" ? `tool ${row.name}` : row.kind === "prompt" ? "prompt" : row.kind === "given" ? `${row.name} given` : `turn ${row.name}`;
  name.append(title, ...[row.note, row.finish_reason === "stop" ? "" : row.finish_reason].filter(Boolean).map((note) => make("em", note)));
  name.title = name.textContent;
  const cells = [
    name, make("span", row.pieces.map(([, text]) => text).join("").replace(/\s+/g, " ").trim().slice(0, 300), { className: "preview" }),
    make("span", row.num_tokens ?? "", { className: "number" }),
    make("span", reward === null ? "" : `${reward > 0 ? "+" : ""}${+reward.toFixed(3)}`, { className: `number ${reward > 0 ? "good" : reward < 0 ? "bad" : ""}` }),
    waitTrack(row.bars, duration),
  ];
  if (!row.pieces.length) {
    const line = make("div", undefined, { className: `line ${row.kind}` });
    line.append(...cells);
    return line;
  }
  const details = make("details"), line = make("summary", undefined, { className: `line ${row.kind}` });
  line.append(...cells);
  details.append(line);
  details.addEventListener("toggle", () => {
    if (details.querySelector("pre")) return;
    const text = make("pre");
    text.append(...row.pieces.map(([version, piece]) => tokenSpan({ text: piece, version }, "version")));
    details.append(text);
  });
  return details;
}

let shownEpisode = "";

function drawEpisode() {
  const form = element("episode-options"), place = element("episode"), reason = report.absent.episodes, failure = element("episode-failure");
  for (const part of [form, element("episode-waits")]) part.hidden = Boolean(reason);
  element("section-episodes").hidden = !reason && !report.episodes.length;
  if (reason) return place.replaceChildren(make("p", reason, { className: "absent" }));
  if (!report.episodes.length) return;
  const select = form.elements.episode, titles = report.episodes.map((episode) => episode.title), chosen = select.value;
  const shown = JSON.stringify([titles, chosen, theme()]);
  if (shown === shownEpisode) return;  // a live run sends the same episodes again; the turns that the user has opened stay open
  shownEpisode = shown;
  select.replaceChildren(...titles.map((title, index) => make("option", title, { value: String(index) })));
  if (chosen && chosen < titles.length) select.value = chosen;
  const episode = report.episodes[select.value], duration = episode.duration_s || 1, colours = waitColours();
  failure.hidden = !episode.failure;
  failure.textContent = episode.failure;
  const versions = [...new Set(episode.rows.flatMap((row) => row.pieces.map(([version]) => version)))].filter((version) => version >= 0).sort((left, right) => left - right);
  element("episode-versions").replaceChildren(...versions.map((version) => tokenSpan({ text: `v${version}`, version }, "version")));
  element("episode-waits").replaceChildren(...Object.entries(episode.waits_s).map(([what, spent]) => {
    const item = make("li"), mark = make("b");
    mark.style.background = colours[what];
    item.append(mark, `${what} ${seconds(spent)}, ${percent(spent / duration)}`);
    return item;
  }));
  const head = make("div", undefined, { className: "line head" }), times = make("span", undefined, { className: "times" });
  times.append(...["0 s", seconds(duration / 2), seconds(duration)].map((time) => make("span", time)));
  head.append(make("span", "turn"), make("span", "text", { className: "preview" }), make("span", "tokens", { className: "number" }), make("span", "reward", { className: "number" }), times);
  const whole = make("div", undefined, { className: "line" });
  whole.append(make("span", "whole episode", { className: "name" }), make("span", "", { className: "preview" }), make("span"), make("span"), waitTrack(episode.waits, duration));
  const rest = episode.num_left_out ? [make("p", `${episode.num_left_out} further rows are left out; samples/ has them all.`, { className: "absent" })] : [];
  place.replaceChildren(head, whole, ...episode.rows.map((row) => episodeRow(row, duration)), ...rest);
}

function draw(next) {
  report = next;
  element("title").textContent = report.run.title;
  element("facts").textContent = report.run.facts;
  element("alarms").replaceChildren(...report.alarms.map(({ text, lasts }) => make("li", text, { className: lasts ? "lasts" : "" })));
  element("advice").hidden = !report.advice;
  element("advice").textContent = report.advice ?? "";
  element("figures").replaceChildren(...report.figures.map(({ name, value, note }) => {
    const item = make("li", undefined, { title: note ?? "" });
    item.append(make("b", value), make("span", name));
    return item;
  }));
  const palette = PALETTES[theme()];
  for (const [name, build] of Object.entries(CHARTS)) drawChart(name, report.absent[name] ? null : build(report, palette));
  drawMembers(report.members);
  drawEpisode();
  drawSamples();
}

/** Zooms and moves a chart from the keyboard. */
function onKey(event) {
  const chart = drawn[event.currentTarget.id], zoom = chart?.getOption().dataZoom?.[0];
  if (!zoom || event.ctrlKey || event.metaKey || event.altKey) return;
  const middle = (zoom.start + zoom.end) / 2, half = (zoom.end - zoom.start) / 2;
  const moves = {
    "+": [middle, half / 1.6], "=": [middle, half / 1.6], "-": [middle, half * 1.6], "_": [middle, half * 1.6],
    ArrowLeft: [middle - half / 3, half], ArrowRight: [middle + half / 3, half], 0: [50, 50], Home: [half, half], End: [100 - half, half],
  };
  if (!(event.key in moves)) return;
  event.preventDefault();
  let [centre, width] = moves[event.key];
  width = Math.max(0.01, Math.min(50, width));
  centre = Math.max(width, Math.min(100 - width, centre));
  chart.dispatchAction({ type: "dataZoom", start: centre - width, end: centre + width });
}

/** Follows a live run: each event announces a newer document. */
function follow() {
  const live = element("live"), events = new EventSource("events");
  const say = (text, lost) => Object.assign(live, { hidden: false, textContent: text, className: lost ? "lost" : "" });
  const fetchReport = async () => {
    const answer = await fetch("document.json");
    if (!answer.ok) throw new Error(`document.json: ${answer.status}`);
    draw(await answer.json());
  };
  events.addEventListener("report", async () => {
    try {
      await fetchReport();
      say(report.run.state);
    } catch (error) {
      say(`no report: ${error.message}`, true);
    }
  });
  events.addEventListener("failed", (event) => say(event.data, true));
  events.onerror = () => say("the run does not answer: it has ended, or the connection is lost", true);
}

function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  element("theme").addEventListener("click", () => setTheme(theme() === "dark" ? "light" : "dark"));
  element("sample-options").addEventListener("change", drawSamples);
  element("episode-options").addEventListener("change", drawEpisode);
  for (const name of Object.keys(CHARTS)) element(name).addEventListener("keydown", onKey);
  addEventListener("resize", () => Object.values(drawn).forEach((chart) => chart.resize()));
  const embedded = JSON.parse(element("document").textContent);
  if (embedded) draw(embedded);
  else follow();
}

start();
