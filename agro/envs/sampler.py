"""Episodes as a sampler: the turns of all episodes are decoded together, each as soon as it can be."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from agro import config
from agro.envs.episode import Episode
from agro.envs.protocol import Environment
from agro.samplers import HFSampler, Request, Sampler, Sampling
from agro.types import Prompt, Sample


class EpisodeSampler:
    """Plays episodes of at most `max_turns` turns of the sampler's policy; a turn has at most `Sampling.max_new` tokens.

    The keys and values of a context are computed anew for each turn.
    """

    def __init__(self, sampler: HFSampler, environment: Environment, max_turns: int) -> None:
        self.sampler, self.environment, self.max_turns = sampler, environment, max_turns
        self.name = uuid.uuid4().hex  # of its episodes: seeds and numbers come again in other runs

    @property
    def version(self) -> int:
        return self.sampler.version

    @version.setter
    def version(self, version: int) -> None:
        self.sampler.version = version

    def sample(self, prompts: Sequence[Prompt], n: int, options: Sampling) -> Iterator[Sample]:
        """See `agro.samplers.Sampler`. An episode is one sample, several only where a chat template rewrites history.

        `response` is all that follows the prompt, observations included; meta["last_turn"] is the last turn alone,
        short of a stop text of `options`. The noise of an episode goes on over its turns.
        """
        return self._play(deque(self.sampler.requests(prompts, n, options)), options)

    def _play(self, waiting: deque[Request], options: Sampling) -> Iterator[Sample]:
        policy, live = self.sampler.policy, dict[int, Episode]()
        stops = replace(options, stop=tuple(dict.fromkeys((*options.stop, *self.environment.stop))))
        for done in self.sampler.decode(waiting, stops):
            number, prompt, tokens = done.request.number, done.request.prompt, done.tokens.tolist()
            episode = live.pop(number, None) or Episode(
                self.environment, policy, prompt, done.request.ids, self.max_turns
            )
            ended = tokens[-1] in policy.eos_ids or stops.before_stop(policy.decode(tokens))[1]
            if episode.turn(tokens, done.logp.tolist(), cut=not ended):
                live[number] = episode
                room = min(options.max_new, policy.context - len(episode.ids))
                waiting.appendleft(Request(number, prompt, episode.ids, room, episode.sampled))
            else:
                yield from episode.samples(
                    f"{self.name}-{options.seed}-{number}",
                    options.before_stop(episode.turns[-1])[0],
                    {"index": number},
                    sampling=stops.as_json(),
                    version=self.version,
                    role="policy",
                    source="policy",
                )


def in_environment(
    sampler: HFSampler, environment: Environment | None, config: config.Environment | None
) -> Sampler:
    """The sampler itself, or where there is an environment, its episodes."""
    return (
        sampler
        if environment is None or config is None
        else EpisodeSampler(sampler, environment, config.max_turns)
    )
