"""Names on Redis. `{run}` in braces keeps a run's keys in one slot of a Redis Cluster."""

CONSUMER_GROUP_PRODUCERS = "producers"
CONSUMER_GROUP_TRAINER = "trainer"

ENTRY_SCHEMA_FIELD = "schema"
ENTRY_BODY_FIELD = "body"


def tickets_stream(run_id: str) -> str:
    """Stream of open tickets."""
    return f"deltawire:{{{run_id}}}:tickets"


def groups_stream(run_id: str) -> str:
    """Stream of finished groups."""
    return f"deltawire:{{{run_id}}}:groups"


def dead_letters_stream(run_id: str) -> str:
    """Stream of entries that could not be used, each with its reason."""
    return f"deltawire:{{{run_id}}}:dead"


def replicas_key(run_id: str, replica_id: str) -> str:
    """A replica's heartbeat: its status as JSON, with a time to live."""
    return f"deltawire:{{{run_id}}}:replica:{replica_id}"


def replica_index_key(run_id: str) -> str:
    """Sorted set of replica ids by the Unix millisecond at which their heartbeat runs out."""
    return f"deltawire:{{{run_id}}}:replicas"


def issued_key(run_id: str) -> str:
    """Set of ticket ids already issued: a ticket is issued once."""
    return f"deltawire:{{{run_id}}}:issued"


def finished_key(run_id: str) -> str:
    """Hash of group ids already appended -> idempotency key: a group is appended once."""
    return f"deltawire:{{{run_id}}}:finished"


def settled_key(run_id: str) -> str:
    """Sorted set of group ids by the Unix millisecond of their ack: soon to be forgotten."""
    return f"deltawire:{{{run_id}}}:settled"


def withdrawn_key(run_id: str) -> str:
    """Set of ids of tickets that were withdrawn at the end of the run."""
    return f"deltawire:{{{run_id}}}:withdrawn"


def counters_key(run_id: str) -> str:
    """Hash of counters that outlive the entries they count: `doubled`, `dead`, `dead:<reason>`."""
    return f"deltawire:{{{run_id}}}:counters"
