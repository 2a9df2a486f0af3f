"""The form of an answer that clients ask for."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """What is asked for."""

    model_config = ConfigDict(extra="forbid")
    color: Literal["red", "green"]
    sure: bool
