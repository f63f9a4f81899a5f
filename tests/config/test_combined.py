"""--kv-transfer-config: one JSON object for several settings. (--kv-events-config is tested with its publisher.)"""

from __future__ import annotations

import json

import pytest

from llmkit.config import load_config
from llmkit.errors import ConfigError

WHOLE = {
    "kv_connector": "offload",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"host_gib": 2},
    "kv_load_failure_policy": "fail",
}


def loaded(value, **more):
    return load_config(flags={"kv_transfer_config": value, **more}, env={})


@pytest.mark.parametrize("value", [WHOLE, json.dumps(WHOLE)])
def test_it_sets_the_connector_its_role_policy_and_options(value):
    done = loaded(value)
    connector = done.config.connector
    assert (connector.name, connector.role, connector.load_failure_policy) == ("offload", "producer", "fail")
    assert done.config.plugins.options == {"connector": {"offload": {"host_gib": 2}}}
    assert done.sources["connector.role"] == "flag --kv-transfer-config"
    assert done.sources["connector.load_timeout_s"] == "default"


def test_it_comes_from_the_environment_and_files_too_and_flags_win(tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text("kv-transfer-config: {kv_connector: offload, kv_role: kv_consumer}\n")
    env = {"LLMKIT_KV_TRANSFER_CONFIG": json.dumps({"kv_connector": "multi"})}
    done = load_config(file=file, env=env, flags={"connector_role": "producer"})
    assert (done.config.connector.name, done.config.connector.role) == ("multi", "producer")
    assert load_config(file=file, env={}).config.connector.role == "consumer"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", "JSON"),
        ([1], "JSON object"),
        ({}, "kv_connector"),
        ({"kv_connector": 5}, "kv_connector"),
        (WHOLE | {"kv_role": "both"}, "kv_producer"),
        (WHOLE | {"kv_rank": 0}, "kv_rank.*Valid: kv_connector"),
        (WHOLE | {"kv_connector_extra_config": [1]}, "kv_connector_extra_config"),
        (WHOLE | {"kv_load_failure_policy": "ignore"}, "recompute, fail"),
    ],
)
def test_what_makes_no_sense_names_the_flag_or_the_key(value, words):
    with pytest.raises(ConfigError, match=words):
        loaded(value)


def test_a_setting_given_beside_it_is_given_twice():
    with pytest.raises(ConfigError, match=r"connector\.name is given twice"):
        loaded(WHOLE, connector="multi")
