"""Work that outlasts its round: in SSP and ASP the next round opens while some participants still
train an earlier one, and they are carried over.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.vocabulary.keys import base_key_of, update_key
from xain_coordinator.core.vocabulary.layered import excluding
from xain_coordinator.core.vocabulary.replacing import replace
from xain_coordinator.core.vocabulary.values import Base, Update


@dataclass(frozen=True)  # without slots: see replacing.py
class BufferedWork:
    """Training of earlier rounds that is under way, and what it has brought. Empty in BSP.

    carried: between two rounds, participants that still train an earlier round, with its number.
    bases: start of the training of earlier rounds that are still trained, by round.
    counted: the latest update of each participant, and the round that it was trained for, since
        models may follow each other faster than an answer travels.
    named: base keys of updates that count under another name than their sender's, by the round
        that they were trained for, as long as it is in `bases`.
    """

    carried: Mapping[str, int] = field(default_factory=dict)
    bases: Mapping[int, Base] = field(default_factory=dict)
    counted: Mapping[str, tuple[int, Update]] = field(default_factory=dict)
    named: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def without(self, participant_id: str) -> "BufferedWork":
        """Stop waiting for a participant."""
        return replace(self, carried=excluding(self.carried, participant_id))

    def after_round(
        self, round_: Round, base: Base, carried: Mapping[str, int], members: Collection[str]
    ) -> "BufferedWork":
        """The work that outlasts a round, once its model is published: participants that go on, the
        models that they train from, and the latest counted update of each member.

        base: start of the training of the round. carried: participants that go on.
        """
        bases = {**self.bases, round_.number: base}
        new = {p: (round_.trained_by(p), update) for p, update in round_.updates.items()}
        trained = sorted(set(carried.values()))
        named = {number: self.named.get(number, ()) for number in trained}
        for participant_id, (number, update) in new.items():
            key = base_key_of(update.weights.ref.key)
            if number in named and key != update_key(number, participant_id):
                named[number] += (key,)
        return BufferedWork(
            carried,
            {number: bases[number] for number in trained},
            {p: latest for p, latest in {**self.counted, **new}.items() if p in members},
            {number: keys for number, keys in named.items() if keys},
        )
