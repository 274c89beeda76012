"""The base of every message: frozen, closed, and strict about what it does not know."""

from pydantic import BaseModel, ConfigDict


class WireModel(BaseModel):
    """A message between processes. Unknown fields are refused, values never change."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class OpenWireModel(BaseModel):
    """A message whose sender may be newer or foreign: unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")
