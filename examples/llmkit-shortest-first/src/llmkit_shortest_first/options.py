"""The plugin's options: `--set scheduler.shortest-first.max_overtakes=8`."""

from pydantic import BaseModel, ConfigDict, Field


class ShortestFirstOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_overtakes: int = Field(16, ge=0, description="How many later arrivals may overtake a waiting request.")
