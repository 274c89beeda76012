"""Every way deltawire can fail, drawn once.

DeltawireError
├── ProtocolError            the other side sent something we must not guess at
│   ├── UnknownSchema          a schema, encoding or format number we do not know
│   └── MalformedMessage       bytes that do not parse; keeps them
├── WeightsError             an object of the chain cannot be used
│   ├── MalformedObject        not a safetensors file of the announced kind
│   ├── ChecksumMismatch       bytes differ from what latest.json promised
│   ├── DigestMismatch         base or new digest is not the one announced
│   ├── LayoutMismatch         names, shapes or dtypes differ from the run's layout
│   └── VersionGap             no route leads from the version held to the one wanted
├── StoreError               the bucket did not do what was asked
│   ├── ObjectMissing          no object under that key
│   ├── ObjectExists           keys are written once; this one is taken
│   ├── InvalidKey             a key that names something outside the prefix
│   ├── Fenced                 a newer trainer owns this run
│   └── StoreUnavailable       the store cannot be reached now; try again
├── StreamError              the streams did not do what was asked
│   ├── StreamUnavailable      they cannot be reached now; try again
│   ├── LeaseLost              the entry was claimed by somebody else
│   └── PayloadTooLarge        a record over the agreed size
├── EngineError              the engine cannot do its job
│   ├── VersionNotServed       a pinned policy version is not the one served
│   └── ReplicaBroken          the weights are not trusted; nothing is generated
├── EnvironmentFault         the environment did not answer as agreed
│   ├── CapacityReached        no free session
│   └── EpisodeFailed          the episode ended in an error; it is data, not a crash
├── JobError                 the job file or an override is wrong; says what to write instead
├── SettingsError            the service was configured wrong; says which variable
└── RemoteError              a peer answered with a problem; keeps status and body
"""


class DeltawireError(Exception):
    """Base of every error that deltawire raises on purpose."""


class ProtocolError(DeltawireError):
    """The other side sent something we must not guess at."""


class UnknownSchema(ProtocolError):
    """A schema, encoding or format number that this version does not know."""


class MalformedMessage(ProtocolError):
    """Bytes that do not parse as the message they should be."""

    def __init__(self, reason: str, *, raw: bytes = b"") -> None:
        super().__init__(reason)
        self.raw = raw


class WeightsError(DeltawireError):
    """An object of the chain cannot be used; live weights were not touched."""


class MalformedObject(WeightsError):
    """Not a safetensors file of the announced kind, or one that lies about its sizes."""


class ChecksumMismatch(WeightsError):
    """The bytes differ from what the chain promised."""

    def __init__(self, key: str, *, expected: str, actual: str) -> None:
        super().__init__(f"{key}: expected sha256 {expected}, found {actual}; fetch it again")
        self.key, self.expected, self.actual = key, expected, actual


class DigestMismatch(WeightsError):
    """The weights under a delta, or after it, are not the ones that were announced."""

    def __init__(self, name: str, *, expected: str, actual: str) -> None:
        super().__init__(
            f"{name}: expected digest {expected}, found {actual}; re-base on an anchor"
        )
        self.name, self.expected, self.actual = name, expected, actual


class LayoutMismatch(WeightsError):
    """Names, shapes or dtypes are not those of the run."""


class VersionGap(WeightsError):
    """No route leads from the version held to the version wanted."""

    def __init__(self, *, have: int | None, want: int) -> None:
        held = "nothing" if have is None else f"version {have}"
        super().__init__(f"no chain of objects leads from {held} to version {want}")
        self.have, self.want = have, want


class StoreError(DeltawireError):
    """The bucket did not do what was asked."""


class ObjectMissing(StoreError):
    """No object under that key."""


class ObjectExists(StoreError):
    """Keys are written once; this one is taken."""


class InvalidKey(StoreError):
    """A key that is not a plain relative path inside the prefix."""


class Fenced(StoreError):
    """A newer trainer owns this run; this one must stop publishing."""


class StoreUnavailable(StoreError):
    """The store cannot be reached now; the call may be repeated."""


class StreamError(DeltawireError):
    """The streams did not do what was asked."""


class StreamUnavailable(StreamError):
    """The streams cannot be reached now; the call may be repeated."""


class LeaseLost(StreamError):
    """The entry was claimed by somebody else meanwhile; drop the work."""


class PayloadTooLarge(StreamError):
    """A record over the agreed size."""


class EngineError(DeltawireError):
    """The engine cannot do its job."""


class VersionNotServed(EngineError):
    """A pinned policy version is not the one served."""

    def __init__(self, *, wanted: int, serving: int | None, retry_after_s: float) -> None:
        super().__init__(f"policy version {wanted} was asked for, {serving} is served")
        self.wanted, self.serving, self.retry_after_s = wanted, serving, retry_after_s


class ReplicaBroken(EngineError):
    """The weights are not trusted; nothing is generated until the replica has re-based."""


class EnvironmentFault(DeltawireError):
    """The environment did not answer as agreed."""


class CapacityReached(EnvironmentFault):
    """The environment has no free session; try again or elsewhere."""


class EpisodeFailed(EnvironmentFault):
    """The episode ended in an error. It becomes a rollout with that status, not a crash."""


class JobError(DeltawireError):
    """The job file or an override is wrong; the message says what to write instead."""


class SettingsError(DeltawireError):
    """The service was configured wrong; the message names the variable."""


class RemoteError(DeltawireError):
    """A peer answered with a problem."""

    def __init__(self, url: str, *, status: int, detail: str) -> None:
        super().__init__(f"{url} answered {status}: {detail}")
        self.url, self.status, self.detail = url, status, detail
