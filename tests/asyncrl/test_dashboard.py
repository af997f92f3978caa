"""The dashboard, requested over HTTP while a run writes to its folder."""

import asyncio
import subprocess
import sys
import urllib.request

import pytest
from aiohttp.test_utils import TestClient, TestServer

from asyncrl.profile.dashboard import TOKEN_VARIABLE, Dashboard, check_dashboard, main
from tests.support.traces import record_run

pytest.importorskip("watchfiles")


async def client_of(run_dir, **options):
    return TestClient(TestServer(Dashboard(run_dir, **options).app()))


async def event(stream):
    """Return the name and the data of the next event in a stream."""
    lines = {}
    while not lines.get("data"):
        name, _, value = (await stream.content.readline()).decode().strip().partition(": ")
        lines[name] = value
    return lines["event"], lines["data"]


async def test_the_dashboard_page_updates_when_the_run_folder_changes(tmp_path):
    (tmp_path / "profile").mkdir()
    async with await client_of(tmp_path) as client, asyncio.timeout(30):
        page = await client.get("/")
        assert page.headers["X-Frame-Options"] == "DENY"
        assert "connect-src 'self'" in await page.text()
        stream = await client.get("/events")
        kind, why = await event(stream)
        assert (kind, "holds no record" in why) == ("failed", True)
        assert (await client.get("/document.json")).status == 503
        record_run(tmp_path)
        while (await event(stream))[0] != "report":
            pass
        document = await (await client.get("/document.json")).json()
        assert len(document["steps"]["labels"]) == 6
        assert [row[0] for row in document["members"]["rows"]] == ["engine-0", "engine-1"]


async def test_the_dashboard_refuses_requests_without_the_token(tmp_path):
    async with await client_of(tmp_path, token="secret") as client:
        for path in ("/", "/document.json", "/events", "/?token=guess"):
            assert (await client.get(path)).status == 401
        assert (await client.get("/", headers={"Authorization": "Bearer secret"})).status == 200
        opened = await client.get("/?token=secret")
        assert (opened.status, opened.url.query_string) == (200, "")
        assert (await client.get("/")).status == 200


async def test_the_dashboard_refuses_a_foreign_host_name(tmp_path):
    async with await client_of(tmp_path) as client:
        assert (await client.get("/", headers={"Host": "evil.example"})).status == 403
        assert (await client.get("/", headers={"Host": "localhost:1"})).status == 200
    async with await client_of(tmp_path, token="secret", only_loopback=False) as client:
        headers = {"Host": "gpu-7.example", "Authorization": "Bearer secret"}
        assert (await client.get("/", headers=headers)).status == 200


def test_the_dashboard_needs_a_token_beyond_loopback(tmp_path, monkeypatch, capsys):
    check_dashboard("127.0.0.1:0", "")
    check_dashboard("[::1]:0", "")
    check_dashboard("0.0.0.0:8265", "secret")
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert main([str(tmp_path), "--address", "0.0.0.0:0"]) == 2
    assert "dashboard_address=0.0.0.0:0 is not loopback" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_the_dashboard_process_prints_its_url_and_exits_with_its_parent(tmp_path, host):
    record_run(tmp_path)
    command = [sys.executable, "-m", "asyncrl.profile.dashboard", str(tmp_path), "--address", f"{host}:0"]
    process = subprocess.Popen([*command, "--with-parent"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    url = process.stdout.readline().strip()
    assert url.startswith(f"http://{host}:")
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert b"echarts" in answer.read()
    process.communicate(timeout=10)  # close the dashboard's stdin; the exit of its parent would close it too
    assert process.returncode == 0
