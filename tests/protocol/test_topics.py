"""Names on Redis: one run's keys lie in one slot, two runs never meet."""

from deltawire.protocol import topics


def test_every_key_of_a_run_carries_the_same_hash_tag() -> None:
    keys = [
        topics.tickets_stream("r"),
        topics.groups_stream("r"),
        topics.dead_letters_stream("r"),
        topics.replicas_key("r", "one"),
        topics.finished_key("r"),
        topics.withdrawn_key("r"),
    ]

    assert all("{r}" in key for key in keys)
    assert len(set(keys)) == len(keys)


def test_runs_do_not_share_keys() -> None:
    assert topics.tickets_stream("a") != topics.tickets_stream("b")
    assert topics.replicas_key("a", "x") != topics.replicas_key("b", "x")
