"""What the model's own files say."""

from __future__ import annotations

import pytest

from llmkit.errors import InvalidRequestError, ModelError
from llmkit.frontend.generation_defaults import default_sampling_params, end_of_sequence_ids


def test_all_ends_of_sequence_count():
    """B08 b."""
    assert end_of_sequence_ids({"eos_token_id": 2}, {"eos_token_id": [2, 30]}, 2, 100) == {2, 30}
    assert end_of_sequence_ids({"eos_token_id": 2}, {}, 3, 100) == {2, 3}
    assert end_of_sequence_ids({}, {"eos_token_id": 0}, None, 100) == {0}
    assert end_of_sequence_ids({}, {"eos_token_id": [5, 500]}, None, 100) == {5}
    assert end_of_sequence_ids({}, {}, None, 100) == frozenset()


def test_a_bad_end_of_sequence_is_the_models_fault():
    with pytest.raises(ModelError, match="eos_token_id"):
        end_of_sequence_ids({}, {"eos_token_id": "</s>"}, None, 100)


def test_unset_parameters_come_from_the_model():
    stated = {"temperature": 0.6, "top_k": 20, "do_sample": True, "max_new_tokens": 99}
    params = default_sampling_params(stated, {"top_k": 5})
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 5, 1.0, 99)


def test_bad_values_and_unknown_fields():
    with pytest.raises(ModelError, match="top_p"):
        default_sampling_params({"top_p": 7}, {})
    with pytest.raises(InvalidRequestError, match="top_kk"):
        default_sampling_params({}, {"top_kk": 1})
