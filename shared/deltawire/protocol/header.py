"""What a safetensors header says of an anchor or a delta: a string-to-string map, both ways.

The seed keys (`sparse`, `model_version`, `sparsity`, `changed_params`, ...) keep the words and the
spelling of TRL's delta branches, so that their readers open our files; ours stand beside them.
"""

import json
from collections.abc import Mapping
from typing import Self

from pydantic import Field

from deltawire.protocol.adapters import ADAPTER_ENCODING
from deltawire.protocol.errors import MalformedObject
from deltawire.protocol.versions import PolicyVersion
from deltawire.protocol.wire_model import WireModel

HEADER_FORMAT = "deltawire"
HEADER_VERSION = "1"


class ObjectHeader(WireModel):
    """The metadata of one anchor or delta file."""

    sparse: bool
    """False for an anchor and for a whole adapter."""
    model_version: PolicyVersion
    base_version: PolicyVersion | None = None
    run_id: str = ""
    encoding: str = "seed"
    num_changed: int = 0
    total_elements: int = 0
    changed_params: list[str] = Field(default_factory=list)
    layout_digest: str = ""
    base_digest: str = ""
    new_digest: str = ""

    @property
    def is_adapter(self) -> bool:
        """Whether it is a whole adapter, which replaces that of whatever version is held."""
        return self.encoding == ADAPTER_ENCODING and not self.sparse

    @property
    def density(self) -> float:
        """Share of elements that changed; 1.0 for an anchor, the adapter's share for an adapter."""
        if not self.sparse and not self.is_adapter:
            return 1.0
        return self.num_changed / self.total_elements if self.total_elements else 0.0

    def to_metadata(self) -> dict[str, str]:
        """The strings that safetensors stores. Booleans and floats are spelled as Python does."""
        return {
            "format": HEADER_FORMAT,
            "version": HEADER_VERSION,
            "sparse": str(self.sparse),
            "model_version": str(self.model_version),
            "sparsity": repr(1.0 - self.density),
            "changed_params": json.dumps(self.changed_params),
            "num_changed_params": str(len(self.changed_params)),
            "total_changed_elements": str(self.num_changed),
            "num_changed": str(self.num_changed),
            "total_elements": str(self.total_elements),
            "base_version": "" if self.base_version is None else str(self.base_version),
            "run_id": self.run_id,
            "encoding": self.encoding,
            "layout_digest": self.layout_digest,
            "base_digest": self.base_digest,
            "new_digest": self.new_digest,
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], *, name: str) -> Self:
        """Read what we wrote. Raises MalformedObject naming the file and the field."""
        try:
            base = metadata["base_version"]
            return cls(
                sparse={"True": True, "False": False}[metadata["sparse"]],
                model_version=PolicyVersion(int(metadata["model_version"])),
                base_version=PolicyVersion(int(base)) if base else None,
                run_id=metadata["run_id"],
                encoding=metadata["encoding"],
                num_changed=int(metadata["num_changed"]),
                total_elements=int(metadata["total_elements"]),
                changed_params=json.loads(metadata["changed_params"]),
                layout_digest=metadata["layout_digest"],
                base_digest=metadata["base_digest"],
                new_digest=metadata["new_digest"],
            )
        except (KeyError, ValueError, RecursionError) as error:
            raise MalformedObject(f"{name}: header field missing or wrong: {error!r}") from error
