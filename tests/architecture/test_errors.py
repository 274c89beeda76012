"""Every way to fail has a status, a sentence, and a place in the drawn tree."""

from deltawire.protocol import errors
from deltawire.service.problems import STATUS_OF, problem_of


def _tree(kind: type[errors.DeltawireError]) -> set[type[errors.DeltawireError]]:
    return {kind}.union(*(_tree(child) for child in kind.__subclasses__()))


def _protocol_errors() -> set[type[errors.DeltawireError]]:
    return {kind for kind in _tree(errors.DeltawireError) if kind.__module__ == errors.__name__}


def test_every_error_of_the_tree_has_a_status() -> None:
    assert set(STATUS_OF) == _protocol_errors()


def test_every_error_is_drawn_and_has_a_sentence() -> None:
    drawing = errors.__doc__ or ""
    for kind in _protocol_errors():
        assert kind.__name__ in drawing
        assert (kind.__doc__ or "").strip().endswith(".")


def test_an_error_of_a_child_class_answers_as_its_parent() -> None:
    class Torn(errors.MalformedObject):
        """A file that ends early."""

    problem = problem_of(Torn("deltas/step_000001.safetensors ends at byte 12"))
    assert problem.status == STATUS_OF[errors.MalformedObject]
    assert "byte 12" in problem.detail
