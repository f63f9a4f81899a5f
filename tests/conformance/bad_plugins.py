"""Plugins that load and build, each with one thing wrong with it: what the conformance kit must notice."""

from __future__ import annotations

import os
import threading
import time

from pydantic import BaseModel, ConfigDict, Field

from llmkit.hookspecs import PluginInfo, hookimpl


def in_a_child() -> bool:
    """Whether this is the process that the kit has started, and not the one with pytest in it."""
    import sys

    return "pytest" not in sys.modules


class Table:
    """A correct kernel table, for plugins with something else wrong with them; its kind has no suite of its own."""

    info = PluginInfo(summary="a table")

    @staticmethod
    @hookimpl
    def llmkit_kernels():
        from llmkit_kernels.torch_table import TorchKernels

        return TorchKernels()


# ---- the front door


class TwoLines(Table):
    info = PluginInfo(summary="a table\nof two lines")


class BadRequirement(Table):
    info = PluginInfo(summary="a table", requires=("numpy >= ",))


class ProblemsAreText(Table):
    @staticmethod
    @hookimpl
    def llmkit_problems(environment):
        return "" if environment.device_type == "cpu" else "it needs a CPU"


class ProblemsFailElsewhere(Table):
    @staticmethod
    @hookimpl
    def llmkit_problems(environment):
        return [] if environment.device_type == "cpu" or environment.compute_capability[0] > 8 else ["old"]


class Sleepy(Table):
    @staticmethod
    @hookimpl
    def llmkit_problems(environment):
        time.sleep(0.6 if environment.device_type == "cuda" else 0)
        return []


# ---- options


class LaxOptions(BaseModel):
    size: int = Field(1, description="Size.")


class Lax(Table):
    info = PluginInfo(summary="a table", options=LaxOptions)


class SilentOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = 1


class Silent(Table):
    info = PluginInfo(summary="a table", options=SilentOptions)


class WrongOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = Field(0, ge=1, description="Size.")


class WrongDefault(Table):
    info = PluginInfo(summary="a table", options=WrongOptions)


class OneWayOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    place: object = Field(default_factory=object, description="Place.")


class OneWay(Table):
    info = PluginInfo(summary="a table", options=OneWayOptions)


# ---- processes


class Shared(Table):
    _made: list = []  # noqa: RUF012

    @staticmethod
    @hookimpl
    def llmkit_kernels():
        from llmkit_kernels.torch_table import TorchKernels

        Shared._made.append(TorchKernels())
        return Shared._made[0]


class LeavesAThread(Table):
    @staticmethod
    @hookimpl
    def llmkit_kernels():
        from llmkit_kernels.torch_table import TorchKernels

        threading.Thread(target=threading.Event().wait, daemon=True, name="forgotten").start()
        return TorchKernels()


class FailsInAChild(Table):
    @staticmethod
    @hookimpl
    def llmkit_kernels():
        from llmkit_kernels.torch_table import TorchKernels

        if in_a_child():
            raise RuntimeError("not here")
        return TorchKernels()


class EndsTheChild(Table):
    @staticmethod
    @hookimpl
    def llmkit_kernels():
        from llmkit_kernels.torch_table import TorchKernels

        if in_a_child():
            os._exit(3)
        return TorchKernels()


class TouchesCuda(Table):
    @staticmethod
    @hookimpl
    def llmkit_kernels():
        import bad_cuda  # noqa: F401

        from llmkit_kernels.torch_table import TorchKernels

        return TorchKernels()


# ---- kinds


class Starving:
    """A policy that forgets who was preempted."""

    info = PluginInfo(summary="a policy")

    @staticmethod
    @hookimpl
    def llmkit_scheduler_policy():
        from llmkit_schedulers.fcfs import FcfsPolicy

        class Forgetful(FcfsPolicy):
            def requeue(self, request):
                """A preempted request is forgotten."""

        return Forgetful()


class Stuck:
    """A policy that is asked for the next request and never answers."""

    info = PluginInfo(summary="a policy")

    @staticmethod
    @hookimpl
    def llmkit_scheduler_policy():
        from threading import Event

        from llmkit_schedulers.fcfs import FcfsPolicy

        class Waiting(FcfsPolicy):
            def peek(self):
                Event().wait()

        return Waiting()


class OffScale:
    """Attention whose scores are a little too large."""

    info = PluginInfo(summary="attention")

    @staticmethod
    @hookimpl
    def llmkit_attention_backend():
        import dataclasses

        from llmkit_attention.torch_backend import TorchAttention

        class Sharper(TorchAttention):
            def forward(self, layer, *arguments):
                return super().forward(dataclasses.replace(layer, scale=layer.scale * 1.001), *arguments)

        return Sharper()


class OneTooFar(OffScale):
    @staticmethod
    @hookimpl
    def llmkit_attention_backend():
        from bad_kinds import OneTooFarAttention

        return OneTooFarAttention()


class Untidy(OffScale):
    @staticmethod
    @hookimpl
    def llmkit_attention_backend():
        from bad_kinds import UntidyAttention

        return UntidyAttention()


class Clearing(OffScale):
    @staticmethod
    @hookimpl
    def llmkit_attention_backend():
        from bad_kinds import ClearingAttention

        return ClearingAttention()


class Crowded(OffScale):
    @staticmethod
    @hookimpl
    def llmkit_attention_backend():
        from bad_kinds import CrowdedAttention

        return CrowdedAttention()


class Leaky(OffScale):
    @staticmethod
    @hookimpl
    def llmkit_attention_backend():
        from bad_kinds import LeakyAttention

        return LeakyAttention()


class Mute(OffScale):
    @staticmethod
    @hookimpl
    def llmkit_attention_backend():
        from bad_kinds import MuteAttention

        return MuteAttention()


class Rigid(OffScale):
    @staticmethod
    @hookimpl
    def llmkit_attention_backend():
        from bad_kinds import RigidAttention

        return RigidAttention()


class Short(OffScale):
    @staticmethod
    @hookimpl
    def llmkit_attention_backend():
        from bad_kinds import ShortAttention

        return ShortAttention()


class Lenient:
    """A grammar that allows everything."""

    info = PluginInfo(summary="grammars")

    @staticmethod
    @hookimpl
    def llmkit_grammar_compiler(vocabulary):
        from bad_kinds import LenientCompiler

        return LenientCompiler(vocabulary)


class Forgetful(Lenient):
    """A grammar engine that only works in one process."""

    @staticmethod
    @hookimpl
    def llmkit_grammar_compiler(vocabulary):
        from bad_kinds import ForgetfulCompiler

        return ForgetfulCompiler(vocabulary)


class Talkative:
    """A connector that reports what nobody has asked for."""

    info = PluginInfo(summary="a connector")

    @staticmethod
    @hookimpl
    def llmkit_connector():
        from bad_kinds import TalkativeConnector

        return TalkativeConnector()


class Careless:
    """A model that does not miss a weight."""

    info = PluginInfo(summary="a model")

    @staticmethod
    @hookimpl
    def llmkit_model(context):
        from llmkit_models.llama import llmkit_model

        model = llmkit_model(context)
        model.load_weights = lambda tensors: None  # noqa: ARG005
        return model
