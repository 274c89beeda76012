"""The control plane: routes, the notice, statuses and problems.

Statuses and the records in them are open: services of one run may be of different ages, and whoever
reads a newer one's status passes over what it does not know instead of seeing nothing.
"""

from typing import Literal

from pydantic import Field

from deltawire.protocol.versions import PolicyVersion
from deltawire.protocol.wire_model import OpenWireModel, WireModel

TOKEN_HEADER = "X-Deltawire-Token"
"""Where a private Space's proxy uses `Authorization` for itself."""

SERVING_HEADER = "X-Deltawire-Serving"
"""With a 409 for a version not served: the one that is, so that a caller sees what has passed."""

HEALTHZ, READYZ, STATUS, METRICS = "/healthz", "/readyz", "/status", "/metrics"
UPDATE_WEIGHTS, PAUSE, RESUME, STOP, SYNC = (
    "/update_weights",
    "/pause",
    "/resume",
    "/stop",
    "/sync",
)
GENERATE = "/v1/generate"
STREAMS = "/streams"
"""Prefix of the trainer's HTTPS face of the streams."""


class WeightNotice(OpenWireModel):
    """A hint to look: new weights lie in the bucket. A lost or doubled one is harmless."""

    repo_id: str = Field(max_length=512)
    """Bucket coordinates; must equal the ones the replica was configured with."""
    filename: str = Field(max_length=512)
    """Key relative to the bucket prefix."""
    version: PolicyVersion | None = None
    sha256: str | None = None
    xet_hash: str | None = None
    size: int | None = None


class NoticeReceipt(WireModel):
    """202: the notice was taken; what the replica serves now."""

    accepted: bool
    serving: PolicyVersion | None
    reason: str = ""


class Problem(WireModel):
    """What every error answers with (RFC 9457 in spirit)."""

    type: str
    """Class of the error tree."""
    title: str
    status: int
    detail: str


ReplicaState = Literal["joining", "serving", "staging", "applying", "broken", "draining"]


class AppliedUpdate(OpenWireModel):
    """One version change of a replica. The pause is the time no token could be made."""

    version: PolicyVersion
    base_version: PolicyVersion | None
    kind: str
    encoding: str
    bytes: int
    changed: int
    total: int
    fetch_s: float
    stage_s: float
    pause_ms: float
    applied_at: float
    mode: str = ""
    """keep, keep_kv, drain or abort: what became of running requests; "" when none could run."""
    recomputed_tokens: int = 0
    """Tokens of running requests whose KV was computed again (mode keep)."""


class ReplicaStatus(OpenWireModel):
    """GET /status of an inference replica, and its heartbeat in the registry."""

    service: Literal["inference"] = "inference"
    replica_id: str
    run_id: str
    url: str = ""
    engine: str
    state: ReplicaState
    version: PolicyVersion | None
    head_version: PolicyVersion | None = None
    digest: str = ""
    updates: list[AppliedUpdate] = Field(default_factory=list)
    """The newest ones, oldest first."""
    updates_total: int = 0
    rejected_total: int = 0
    last_error: str = ""
    running_requests: int = 0
    tokens_per_s: float = 0.0
    tokens_total: int = 0
    episodes_running: int = 0
    groups_finished: int = 0
    store_budget: dict[str, float] = Field(default_factory=dict)
    """Calls made and allowed, where the store has a budget."""
    swap_mode: str = ""
    """What a swap does to running requests: this replica's own setting, or the job's choice."""
    waits_for: str = ""
    """tickets, environment, engine, weights or nothing: what holds the producer up."""
    capabilities: list[str] = Field(default_factory=list)
    started_at: float = 0.0

    @property
    def lag(self) -> int | None:
        """Newest published version minus the one served."""
        if self.version is None or self.head_version is None:
            return None
        return max(0, self.head_version - self.version)


class SyncRecord(OpenWireModel):
    """One publish, as the trainer saw it."""

    version: PolicyVersion
    kind: str
    encoding: str
    key: str
    bytes: int
    full_bytes: int
    changed: int
    total: int
    density: float
    diff_s: float
    encode_s: float
    upload_s: float
    commit_s: float
    announce_s: float
    total_s: float
    encoding_reason: str = ""
    """Why this encoding: configured, or what `auto` weighed."""


class StepRecord(OpenWireModel):
    """One optimizer step. Metrics are those of the job and of the algorithm, by name."""

    step: int
    version: PolicyVersion
    """The version this step published."""
    reward: float
    reward_std: float
    staleness: float
    """Mean over the batch; of the oldest token of each sample."""
    staleness_max: int
    groups: int
    rollouts: int
    tokens: int
    loss: float
    grad_norm: float
    lr: float
    ess: float
    """Effective sample size of the importance weights, as a share of the batch."""
    mismatch_kl: float
    metrics: dict[str, float] = Field(default_factory=dict)
    phases_s: dict[str, float] = Field(default_factory=dict)
    """wait, forward_backward, optimizer, diff, encode, upload, commit, announce."""
    sync: SyncRecord | None = None
    finished_at: float = 0.0
    errors: int = 0
    """Rollouts left out because of an error: of this step's groups, and of those dropped before."""
    error_reason: str = ""
    """The most frequent one, such as "picky: ValueError: ... (job.py:12)"."""
    groups_with_signal: int | None = None
    """Groups whose rewards differed enough to teach something; None where it was not counted."""


class EvalRecord(OpenWireModel):
    """One evaluation: held-out episodes of one version, never trained on."""

    version: PolicyVersion
    step: int
    """The step that made the version."""
    reward: float | None
    """Mean over the episodes that count; None of none."""
    episodes: int
    """That count: without error, and sampled by this version alone."""
    finished: int
    """That came home."""
    expected: int
    metrics: dict[str, float] = Field(default_factory=dict)
    error_reason: str = ""
    """Why episodes do not count: the most frequent reason."""


class GroupCounts(OpenWireModel):
    """Where every ticket went. issued = trained + open + sum(dropped) + lost."""

    issued: int = 0
    trained: int = 0
    open: int = 0
    dropped: dict[str, int] = Field(default_factory=dict)
    lost: int = 0
    doubled: int = 0


class SetAside(OpenWireModel):
    """A ticket or group among the dead letters."""

    id: str
    reason: str


TrainerState = Literal["starting", "waiting", "training", "paused", "finished", "failed"]


class TrainingMemory(OpenWireModel):
    """What the weights under training take, without activations."""

    parameters: int
    """All of the model, an adapter's among them."""
    trainable: int
    bytes: int
    """Masters, gradients, Adam's moments, the working copy and the published bits."""
    full_bytes: int
    """The same if all weights of the base model were trained."""


class TrainerStatus(OpenWireModel):
    """GET /status of the trainer."""

    service: Literal["trainer"] = "trainer"
    run_id: str
    job: str
    model: str
    state: TrainerState
    reason: str = ""
    step: int
    steps: int
    version: PolicyVersion
    digest: str = ""
    store: str
    groups: GroupCounts = GroupCounts()
    dead_letters: list[SetAside] = Field(default_factory=list)
    """The newest ones, oldest first."""
    history: list[StepRecord] = Field(default_factory=list)
    evals: list[EvalRecord] = Field(default_factory=list)
    rollouts_held: int = 0
    """At home and waiting for the next step."""
    rollouts_per_step: int = 0
    errors_total: int = 0
    """Rollouts left out because of an error, those not yet on the record of a step too."""
    error_reason: str = ""
    replicas: list[ReplicaStatus] = Field(default_factory=list)
    waits_for: str = ""
    eta_s: float | None = None
    started_at: float = 0.0
    store_budget: dict[str, float] = Field(default_factory=dict)
    """Calls made and allowed, where the store has a budget."""
    memory: TrainingMemory | None = None


class EnvironmentStatus(OpenWireModel):
    """GET /status of the environment service."""

    service: Literal["environment"] = "environment"
    environment_id: str
    worlds: list[str]
    active_sessions: int
    max_sessions: int
    sessions_total: int
    steps_total: int
    errors_total: int
    reaped_total: int = 0
    draining: bool = False
    started_at: float = 0.0


ENTRY_ID = r"^[0-9]{1,19}-[0-9]{1,19}$"
"""An id of a stream's entry, such as 1764012345678-0: both numbers fit 64 bits."""


class LeaseRef(WireModel):
    """A lease as the HTTPS face of the streams names it."""

    entry_id: str = Field(pattern=ENTRY_ID)
    consumer: str = Field(max_length=128)
    ticket_id: str = Field(max_length=256)
    reason: str = Field("", max_length=512)
    """Why it is given back."""


class ClaimRequest(WireModel):
    """POST /streams/claim: a long poll."""

    consumer: str = Field(min_length=1, max_length=128)
    timeout_s: float = Field(20.0, ge=0.0)


class FinishReceipt(WireModel):
    """POST /streams/finish: whether this group is the one on the stream."""

    added: bool


class ReplicaHeartbeat(WireModel):
    """POST /streams/register."""

    status: ReplicaStatus
    ttl_s: float = Field(ge=0.001, le=86_400)
