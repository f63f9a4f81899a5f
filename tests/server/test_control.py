"""Control endpoints against a real engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

G1 = "The English alphabet: A B C D E F G"

pytestmark = pytest.mark.model


def post(live, path, status=200):
    response = live.client.post(path)
    assert response.status_code == status, response.text
    return response


def is_sleeping(live):
    return live.client.get("/is_sleeping").json()["is_sleeping"]


@pytest.mark.parametrize(("stop", "go_on"), [("/pause", "/resume"), ("/sleep?level=1", "/wake_up")])
def test_a_request_waits_while_the_engine_sleeps(live, stop, go_on):
    post(live, stop)
    assert is_sleeping(live)
    assert live.client.get("/health").status_code == 200
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(live.complete, G1, max_tokens=3)
        while live.client.get("/load").json()["server_load"] == 0:
            assert not waiting.done()
        post(live, go_on)
        assert waiting.result(60).json()["choices"][0]["text"] == " H I K"
    assert not is_sleeping(live)


def test_waking_up_in_parts(live, refusal):
    post(live, "/sleep")
    post(live, "/wake_up?tags=weights")
    assert is_sleeping(live)
    post(live, "/wake_up?tags=kv_cache")
    assert not is_sleeping(live)
    refusal(live.client.post("/wake_up?tags=none-such"), 400, "tags")


def test_what_cannot_wake_yet_is_a_conflict(live, refusal):
    post(live, "/sleep")
    refusal(live.client.post("/wake_up?tags=kv_cache"), 409, None)
    assert is_sleeping(live)
    post(live, "/wake_up")
    assert not is_sleeping(live)


def test_a_profile_is_a_file(live, tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    refusal(live.client.post("/stop_profile"), 409, None)
    post(live, "/start_profile")
    refusal(live.client.post("/start_profile"), 409, None)
    assert live.complete(G1, max_tokens=1).status_code == 200
    path = Path(post(live, "/stop_profile").json()["path"])
    assert path.is_file()
    assert path.is_relative_to(tmp_path)


def test_server_info_tells_settings_and_no_secrets(live, serve):
    info = live.client.get("/server_info").json()
    assert info["config"]["server"]["served_model_names"] == ["smol", "alias"]
    assert info["stats"]["num_running"] == 0
    assert info["version"]
    served = serve(api_keys=("geheim",), enable_control_endpoints=True)
    from llmkit_server.routes.control import shown_config

    assert "geheim" not in str(shown_config(served.context))
