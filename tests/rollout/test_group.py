"""A group of episodes: stragglers, over-sampling, agents, scores of turns and of parts of them."""

import asyncio
from dataclasses import replace

import pytest

from deltawire.protocol.errors import EngineError, EpisodeFailed, RemoteError
from deltawire.protocol.generation import GenerateResponse, Sampling
from deltawire.rollout.completer import Completer
from deltawire.rollout.group import StragglerPolicy, Workshop, run_group
from deltawire.rollout.observation import Observation
from deltawire.rollout.waits import Waits


class Play:
    """An environment in memory, with the two methods an episode uses of the real client."""

    environment_id = "play"

    def __init__(self, *answers: Observation | Exception, slow_from: int = 99) -> None:
        self.started = 0
        self.open = 0
        self.heard: list[str] = []
        self._answers, self._slow_from = answers, slow_from

    async def start(self, task, *, deadline, wait_for_room=True):
        self.started += 1
        self.open += 1
        session = Session(self, number=self.started)
        return session, self._answers[0]

    def answer(self, turn: int) -> Observation:
        answer = self._answers[min(turn, len(self._answers) - 1)]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Session:
    environment_id = "play"

    def __init__(self, play: Play, *, number: int) -> None:
        self._play, self._number, self._turn = play, number, 0
        self._open = True

    async def step(self, text, *, deadline):
        self._turn += 1
        self._play.heard.append(text)
        if self._number >= self._play._slow_from:
            await asyncio.sleep(deadline.left_s)
            raise TimeoutError
        return self._play.answer(self._turn)

    async def close(self):
        self._play.open -= self._open
        self._open = False


def said(text: str, **fields: object) -> Observation:
    return Observation(messages=[{"role": "user", "content": text}], **fields)


START = said("start")
END = said("", reward=1.0, done=True)


@pytest.fixture
def play(renderer, make_ticket):
    """Run a group against answers; the group, and what it was made with."""

    async def run(environment, policy, *, stragglers=None, **ticket):
        waits = Waits()
        shop = Workshop(
            environment=environment,
            renderer=renderer,
            completer=Completer(policy, waits=waits),
            waits=waits,
        )
        try:
            return await run_group(
                make_ticket(**ticket),
                shop,
                producer_id="p",
                stragglers=stragglers or StragglerPolicy(),
            )
        finally:
            assert environment.open == 0, "every session is closed"
            assert waits.most == ""

    return run


# -- who is waited for ----------------------------------------------------------------------------


async def test_a_straggler_is_cut_once_enough_have_finished(play, scripted_policy, renderer):
    environment = Play(START, END, slow_from=4)
    group = await play(
        environment,
        scripted_policy(renderer),
        group_size=4,
        stragglers=StragglerPolicy(enough=0.75, grace_s=0.05),
    )
    assert [r.status for r in group.rollouts] == ["ok", "ok", "ok", "error"]
    assert "straggler" in group.rollouts[3].reason


async def test_with_oversampling_the_first_to_finish_are_the_group(play, scripted_policy, renderer):
    environment = Play(START, END, slow_from=5)
    group = await play(
        environment,
        scripted_policy(renderer),
        group_size=4,
        stragglers=StragglerPolicy(oversample=2),
    )
    assert environment.started == 6
    assert [r.status for r in group.rollouts] == ["ok"] * 4


async def test_without_a_policy_the_deadline_is_the_end(play, scripted_policy, renderer):
    group = await play(
        Play(START, END, slow_from=2), scripted_policy(renderer), group_size=2, deadline_s=0.2
    )
    assert [r.status for r in group.rollouts] == ["ok", "error"]
    assert "deadline" in group.rollouts[1].reason


async def test_members_with_prompts_of_their_own_do_not_wait_for_each_other(
    play, renderer, make_completion
):
    class Together:
        """Answers once everybody has asked."""

        def __init__(self) -> None:
            self.asked = 0
            self.all_here = asyncio.Event()

        async def generate(self, request):
            self.asked += 1
            if self.asked == 4:
                self.all_here.set()
            await self.all_here.wait()
            return GenerateResponse(completions=[make_completion([9, 1])] * request.n)

    class Different(Play):
        async def start(self, task, *, deadline, wait_for_room=True):
            session, _ = await super().start(task, deadline=deadline)
            return session, said(f"player {self.started}")

    group = await play(Different(START, END), Together(), group_size=4)
    assert [r.status for r in group.rollouts] == ["ok"] * 4


# -- whose fault it is ----------------------------------------------------------------------------


class Refusing:
    def __init__(self, error: Exception) -> None:
        self._error = error

    async def generate(self, request):
        raise self._error


async def test_a_prompt_the_policy_refuses_is_the_episodes_fault(play):
    refusing = Refusing(RemoteError("http://r", status=422, detail="prompt too long"))
    group = await play(Play(START, END), refusing)
    assert all("prompt too long" in r.reason for r in group.rollouts)


@pytest.mark.parametrize(
    "error", [EngineError("broken"), RemoteError("http://r", status=401, detail="token")]
)
async def test_a_policy_that_cannot_is_not_the_episodes_fault(play, error):
    with pytest.raises(type(error)):
        await play(Play(START, END), Refusing(error))


async def test_an_error_nobody_foresaw_leaves_no_session_open(play, scripted_policy, renderer):
    class Breaking(Play):
        async def start(self, task, *, deadline, wait_for_room=True):
            if self.started:
                raise RuntimeError("unforeseen")
            self.started += 1
            await asyncio.sleep(0.01)
            return await super().start(task, deadline=deadline)

    environment = Breaking(START, END)
    with pytest.raises(RuntimeError, match="unforeseen"):
        await play(environment, scripted_policy(renderer))
    await asyncio.sleep(0.02)
    assert environment.open == 0


async def test_nobody_goes_on_sampling_for_a_group_that_failed(play, renderer):
    class HalfBroken:
        ended = 0

        async def generate(self, request):
            if request.session.endswith("/0"):
                raise EngineError("broken")
            try:
                await asyncio.sleep(60)
            finally:
                self.ended += 1

    class TwoPrompts(Play):
        async def start(self, task, *, deadline, wait_for_room=True):
            session, _ = await super().start(task, deadline=deadline)
            return session, said(f"start {(self.started - 1) // 2}")

    policy = HalfBroken()
    with pytest.raises(EngineError, match="broken"):
        await play(TwoPrompts(START, END), policy, group_size=4)
    assert policy.ended == 1


async def test_a_world_that_breaks_in_the_middle_leaves_what_was_sampled(
    play, scripted_policy, renderer
):
    group = await play(
        Play(START, said("go on"), EpisodeFailed("broke")), scripted_policy(renderer), group_size=1
    )
    [rollout] = group.rollouts
    assert (rollout.status, len(rollout.sequences[0].turns)) == ("error", 2)


async def test_an_end_that_the_world_calls_an_error_is_one(play, scripted_policy, renderer):
    end = said("", done=True, status="error", reason="the grader failed")
    group = await play(Play(START, end), scripted_policy(renderer))
    assert {(r.status, r.reason) for r in group.rollouts} == {("error", "the grader failed")}


async def test_messages_that_the_template_refuses_are_the_worlds_fault(
    play, scripted_policy, renderer, chat_tokenizer, monkeypatch
):
    policy = scripted_policy(renderer)
    monkeypatch.setattr(renderer, "_tokenizer", chat_tokenizer("strict"))
    out_of_turn = Observation(messages=[{"role": "user", "content": "u"}] * 2)
    group = await play(Play(out_of_turn, END), policy)
    assert all("refuses the conversation: not in turns" in r.reason for r in group.rollouts)


# -- what is recorded -----------------------------------------------------------------------------


async def test_rewards_of_turns_add_up_and_stand_beside_them(play, scripted_policy, renderer):
    answers = [
        START,
        said("go on", reward=0.25, turn_reward=0.1, metrics={"greens": 1.0}),
        said("", reward=0.5, done=True, turn_reward=0.2, metrics={"greens": 3.0}),
    ]
    group = await play(Play(*answers), scripted_policy(renderer, ["crane", "slate"]), group_size=1)
    [rollout] = group.rollouts
    assert rollout.reward == rollout.sequences[0].reward == 0.75
    assert [turn.reward for turn in rollout.sequences[0].turns] == [0.1, 0.2]
    assert rollout.metrics == {"greens": 3.0, "turns": 2.0}


async def test_scores_of_all_turns_may_come_at_the_end(play, scripted_policy, renderer):
    end = said("", reward=1.0, done=True, turn_rewards=[0.3, None])
    group = await play(Play(START, said("x"), end), scripted_policy(renderer), group_size=1)
    assert [turn.reward for turn in group.rollouts[0].sequences[0].turns] == [0.3, None]


async def test_a_score_of_characters_becomes_one_of_the_token_that_ends_them(
    play, scripted_policy, renderer
):
    end = said("", reward=1.0, done=True, span_rewards=[(0, 5, 0.5)])
    group = await play(Play(START, end), scripted_policy(renderer, ["hello there"]), group_size=1)
    sequence = group.rollouts[0].sequences[0]
    [scored] = [i for i, reward in enumerate(sequence.token_rewards) if reward]
    turn = sequence.turns[0]
    assert sequence.token_rewards[scored] == 0.5
    said_until = renderer.text(sequence.token_ids[turn.start : scored + 1])
    said_before = renderer.text(sequence.token_ids[turn.start : scored])
    assert len(said_before) < 5 <= len(said_until)


async def test_several_agents_have_a_sequence_each(play, scripted_policy, renderer):
    answers = [
        said("white begins", agent="white"),
        said("white moved", agent="black"),
        said("black moved", agent="white"),
        said("", done=True, agent_rewards={"white": 1.0, "black": -1.0}, reward=0.0),
    ]
    group = await play(Play(*answers), scripted_policy(renderer, ["e4", "e5", "f4"]), group_size=1)
    [rollout] = group.rollouts
    by_agent = {sequence.agent: sequence for sequence in rollout.sequences}
    assert {agent: (len(s.turns), s.reward) for agent, s in by_agent.items()} == {
        "white": (2, 1.0),
        "black": (1, -1.0),
    }
    white = renderer.text(by_agent["white"].token_ids)
    assert "black moved" in white
    assert "white moved" not in white


async def test_a_turn_cut_by_its_length_truncates_the_episode(play, renderer, make_completion):
    class Cut:
        async def generate(self, request):
            cut = make_completion([9, 9], finish="length")
            return GenerateResponse(completions=[cut] * request.n)

    group = await play(Play(START, END), Cut())
    assert {(r.status, r.reason, r.reward) for r in group.rollouts} == {
        ("truncated", "length", 1.0)
    }


async def test_what_could_have_been_sampled_is_kept_when_asked_for(play, renderer, make_completion):
    class Masked:
        async def generate(self, request):
            assert request.want_sampling_mask
            whole = make_completion([9, 1]).model_copy(update={"sampling_mask": [[9, 8], [1]]})
            return GenerateResponse(completions=[whole] * request.n)

    group = await play(Play(START, END), Masked(), sampling=Sampling(top_p=0.9))
    assert group.rollouts[0].sequences[0].sampling_mask == [[9, 8], [1]]


async def test_members_draw_different_tokens_under_one_seed(play, scripted_policy, renderer):
    policy = scripted_policy(renderer)
    await play(Play(START, said("on"), END), policy, group_size=3, sampling=Sampling(seed=5))
    later = [request.sampling.seed for request in policy.requests if request.n == 1]
    assert len(set(later)) == 3


async def test_turns_stop_where_the_template_closes_them(play, scripted_policy, renderer):
    policy = scripted_policy(renderer)
    await play(Play(START, END), policy, sampling=Sampling(stop_token_ids=[77]))
    assert policy.requests[0].sampling.stop_token_ids == [77, *renderer.stop_token_ids]


async def test_an_episode_that_is_over_at_its_start_has_no_turn(play, scripted_policy, renderer):
    group = await play(Play(replace(END, messages=[])), scripted_policy(renderer), group_size=1)
    assert group.rollouts[0].sequences == []
