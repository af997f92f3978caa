"""The report in a real Chromium. The page draws all charts without errors or requests, and keys zoom a chart.

If ``ASYNCRL_SCREENSHOTS`` names a folder, the tests write screenshots into this folder.
"""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models

from asyncrl.profile.report import write_report
from learner.trajectory_log import SCHEMA
from tests.asyncrl.test_samples import keep
from tests.support.browser import visiting
from tests.support.described_episodes import forest, long_episode
from tests.support.traces import record_run

CHARTS = ("timeline", "steps", "fill", "lag", "frontier", "lengths", "publishes")
ZOOM = "(name) => { const { start, end } = drawn[name].getOption().dataZoom[0]; return [start, end]; }"
PREDICTIONS = {
    "advice": "buffer.max_lag=2 would make a step 0.18 s (0.17 to 0.19), mean lag 1.4",
    "curves": [
        {"name": name, "points": [{"max_lag": lag, "lag": 0.8 * lag, "step_s": factor * (0.16 + 0.1 / (1 + lag)),
                                   "interval": [factor * 0.15, factor * 0.3]} for lag in (0, 1, 2, 4)]}
        for name, factor in (("2 learner + 2 engines", 1.0), ("1 learner + 3 engines", 1.3))
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "2026-01-02_03-04-05"
    folder.mkdir()
    record_run(folder, num_steps=24, groups_per_step=24, groups_in_flight=16, max_lag=2)
    (folder / "plan.json").write_text(json.dumps(PREDICTIONS))
    options = "algorithm: {advantage: grpo}\nbuffer: {max_lag: 2}\nmodel: {path: ''}\n"
    (folder / "config.yaml").write_text(f"experiment: sorting\ntotal_steps: 40\n{options}")
    keep(folder, "train", 11, 0.25, 1.0, episodes=[forest(), long_episode()])
    keep(folder, "greedy", 0, 0.75)
    add_tokens(folder)
    return write_report(folder)


def add_tokens(folder):
    (folder / "policy").mkdir()
    letters = {letter: place for place, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    Tokenizer(models.WordLevel(letters, unk_token="a")).save(str(folder / "policy" / "tokenizer.json"))
    apart = [0.01 * (place - 12) * (place % 4) for place in range(24)]
    row = {
        "group_id": 7, "attempt": 0, "prompt_ids": [5, 6, 7], "response_ids": list(range(24)),
        "response_mask": [True] * 22 + [False] * 2, "behavior_logprobs": apart, "learner_logprobs": [0.0] * 24,
        "versions": [3] * 8 + [4] * 10 + [5] * 4 + [-1] * 2, "reward": 1.0, "advantage": 0.5, "lag": 2,
    }  # fmt: skip
    (folder / "tokens").mkdir()
    pq.write_table(pa.Table.from_pylist([row], schema=SCHEMA), folder / "tokens" / "step_00000005_rank0.parquet")


def keep_screenshot(page, name):
    if folder := os.environ.get("ASYNCRL_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_report_draws_every_chart_without_errors_or_requests(report, theme):
    with visiting(report.as_uri(), theme=theme, offline=True) as visit:
        page = visit.page
        assert page.evaluate("Object.keys(drawn).sort()") == sorted(CHARTS)
        assert page.get_attribute("html", "data-theme") == theme
        for name in CHARTS:
            painted = page.evaluate(
                "(name) => { const c = document.querySelector(`#${name} canvas`);"
                " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
                " return new Set(new Uint32Array(d.buffer)).size; }",
                name,
            )
            assert painted > 20, f"the chart {name} is empty"
        assert page.locator("#members tbody tr").count() == 2
        keep_screenshot(page, f"report-{theme}")
        assert visit.complaints == []
        assert visit.requests == [report.as_uri()]


def test_the_keyboard_zooms_moves_and_resets_a_chart(report):
    with visiting(report.as_uri()) as visit:
        page = visit.page
        page.focus("#timeline")
        assert page.evaluate(ZOOM, "timeline") == [0, 100]
        page.keyboard.press("+")
        start, end = page.evaluate(ZOOM, "timeline")
        assert end - start == pytest.approx(62.5)
        page.keyboard.press("ArrowRight")
        assert page.evaluate(ZOOM, "timeline")[0] > start
        keep_screenshot(page, "report-zoomed")
        page.keyboard.press("-")
        page.keyboard.press("0")
        assert page.evaluate(ZOOM, "timeline") == [0, 100]
        assert visit.complaints == []


def test_an_episode_shows_its_turns_tools_versions_rewards_and_waits(report):
    with visiting(report.as_uri(), width=1440) as visit:
        page = visit.page
        names = [text.strip() for text in page.locator("#episode .name").all_text_contents()]
        assert names == [
            *("whole episode", "prompt", "turn 1", "tool search", "tool read <a.txt>", "2 given"),
            *("turn 3branch of turn 2length", "turn 4continues turn 2", "5 given", "turn 6"),
            *("7 givennew root", "turn 8"),
        ]
        assert page.locator("#episode script, #episode pre b").count() == 0
        page.click("#episode summary:has-text('turn 1') >> nth=0")
        assert page.locator("#episode pre i").count() == 2, "the text must have one piece per policy version"
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.locator("#episode pre").count() == 2
        waits = page.locator("#episode-waits li").all_text_contents()
        assert [wait.partition(",")[0] for wait in waits] == [
            "generation 4.10 s", "queue 1.20 s", "tool 1.50 s", "environment 1.40 s"
        ]  # fmt: skip
        keep_screenshot(page, "episode-forest")
        page.select_option("[name=episode]", "1")
        assert page.locator("#episode .line").count() == 2 + 1 + 3 * 400
        assert page.locator("#episode-failure").text_content() == "tool compare did not answer"
        keep_screenshot(page, "episode-long")
        assert visit.complaints == []


def test_samples_are_colored_by_version_or_difference_and_the_theme_can_be_switched(report):
    with visiting(report.as_uri(), width=800) as visit:
        page = visit.page
        page.select_option("[name=kind]", "trained")
        assert page.locator(".sample").count() == 1
        colours = "[...document.querySelectorAll('.sample i')].map((token) => token.style.background)"
        by_version = page.evaluate(colours)
        assert len(by_version) == 24
        assert len(set(by_version)) == 4  # a colour per version, and one for tokens that were not sampled
        page.select_option("[name=colour]", "difference")
        assert page.evaluate(colours) != by_version
        page.click("#theme")
        assert page.get_attribute("html", "data-theme") == "dark"
        keep_screenshot(page, "report-narrow")
        assert visit.complaints == []


def test_a_narrow_page_of_one_step_without_samples_shows_whole_charts_and_no_options(tmp_path):
    record_run(tmp_path, num_steps=1)
    with visiting(write_report(tmp_path).as_uri(), width=400) as visit:
        page = visit.page
        assert page.locator("#sample-options").is_hidden()
        bottom = "(() => { const { top, height } = drawn.timeline.getOption().grid.at(-1); return top + height; })()"
        assert page.evaluate(bottom) < page.evaluate("element('timeline').clientHeight")
        assert page.evaluate("drawn.steps.getOption().series.at(-1).symbol") == "circle"
        assert page.evaluate("drawn.steps.getOption().legend[0].type") == "scroll"
        keep_screenshot(page, "report-of-one-step")
        assert visit.complaints == []
