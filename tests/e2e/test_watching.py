"""The dashboard, Prometheus and the report show a real training."""

import re
import urllib.request

import pytest

from asyncrl.profile.report import write_report
from tests.asyncrl.test_report_page import CHARTS, keep_screenshot
from tests.support.browser import visiting

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 100
NUM_BARS = "() => report ? (report.steps?.labels.length ?? 0) : -1"


def url_in(line):
    return re.search(r"http://\S+", line).group()


def until(page, condition, timeout_s=60):
    """Wait until ``condition`` is true. The page's security policy forbids playwright's own function for such waits."""
    for _ in range(4 * timeout_s):
        if condition():
            return
        page.wait_for_timeout(250)
    raise AssertionError(f"the condition is false after {timeout_s} s; the page says {page.inner_text('#live')!r}")


def test_the_dashboard_prometheus_and_the_report_show_a_training(start):
    run = start(
        "experiment=quickstart",
        "rollout_fleet.engine=transformers",
        f"total_steps={STEPS}",
        "sft.target_accuracy=0.3",
        "dashboard=true",
        "tracker=[prometheus]",
        "prometheus_address=127.0.0.1:0",
    )
    metrics = url_in(run.wait_for_line("tracker prometheus: "))
    dashboard = url_in(run.wait_for_line("dashboard: "))
    run.wait_for_line("step 1/")
    with visiting(dashboard) as visit:
        page = visit.page
        until(page, lambda: page.evaluate(NUM_BARS) >= 1)
        seen = page.evaluate(NUM_BARS)
        until(page, lambda: page.evaluate(NUM_BARS) > seen)
        assert page.inner_text("#live") == "live"
        with urllib.request.urlopen(metrics, timeout=5) as answer:
            shown = answer.read().decode()
        assert 'asyncrl_idle_seconds_total{cause="' in shown
        assert "asyncrl_lag_bucket" in shown
        run.wait_for_line(f"step {STEPS}/")
        keep_screenshot(page, "dashboard-live")
        assert visit.complaints == []
    assert run.finish(120) == 0, run.output
    report = write_report(run.run_dir)
    with visiting(report.as_uri(), offline=True) as visit:
        assert set(visit.page.evaluate("Object.keys(drawn)")) == set(CHARTS) - {"frontier"}
        visit.page.select_option("[name=kind]", "trained")
        assert visit.page.locator(".sample i[title*=nats]").count() > 10
        keep_screenshot(visit.page, "report-of-a-run")
        assert visit.complaints == []
