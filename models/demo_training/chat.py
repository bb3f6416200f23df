# SPDX-License-Identifier: Apache-2.0
"""Generated conversations: facts told and asked for, sums, small talk and questions about deltaserve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from models.demo_training.questions import (
    GREETING_ANSWER,
    GREETINGS,
    THANKS,
    THANKS_ANSWER,
    TOPICS,
)

SLOTS = (
    "name", "city", "color", "port", "pet", "number", "code", "team", "drink", "food", "street", "country",
    "car", "book", "key", "room", "job", "game", "song", "friend", "boss", "machine", "model", "password",
)  # fmt: skip
NUMERIC = {"port", "number", "code", "room", "key", "password"}
_VALUES = (
    "red", "blue", "green", "black", "white", "tea", "coffee", "water", "milk", "bread", "rice", "soup", "cake",
    "Paris", "Rome", "Oslo", "Berlin", "Tokyo", "Lima", "Cairo", "Ada", "Max", "Anna", "Tom", "Eva", "Leo",
    "Mia", "Sam", "Nina", "Paul", "cat", "dog", "horse", "bird", "fish", "chess", "tennis", "piano", "guitar",
    "teacher", "doctor", "nurse", "pilot", "baker", "river", "stone", "tree", "sun", "moon", "star", "gold",
    "silver", "iron", "glass", "paper", "apple", "lemon", "cherry", "peach", "pasta", "pizza", "Spain", "Peru",
)  # fmt: skip
_SYLLABLES = (
    "ka",
    "lo",
    "mi",
    "ne",
    "ru",
    "sa",
    "ti",
    "vo",
    "be",
    "da",
    "fi",
    "go",
    "har",
    "jen",
    "lan",
    "mor",
)
_OPENERS = (
    "",
    "",
    "",
    "",
    "",
    "Please, ",
    "Tell me: ",
    "Hi, ",
    "Hello. ",
    "I have a question. ",
    "So, ",
    "ok, ",
)


@dataclass
class Turn:
    """One exchange. `exact` says that the answer follows from what was said before."""

    user: str
    assistant: str
    exact: bool = True


@dataclass
class Conversation:
    """Turns in order, with an optional system message before them."""

    turns: list[Turn] = field(default_factory=list)
    system: str = ""

    def text(self) -> str:
        """The conversation as the chat template renders it."""
        head = f"<bos><system>{self.system}<eos>" if self.system else "<bos>"
        return head + "".join(f"<user>{t.user}<eos><assistant>{t.assistant}<eos>" for t in self.turns)


def plain(talk: Conversation) -> str:
    """What was said, without markers."""
    return " ".join(f"{turn.user} {turn.assistant}" for turn in talk.turns)


class Talker:
    """Draws turns; one `random.Random` decides everything."""

    def __init__(self, rng: Random, held_out: bool = False) -> None:
        """`held_out`: ask the questions in the phrasings that training never shows."""
        self.rng = rng
        self.held_out = held_out
        self.facts: dict[str, str] = {}

    def value(self, slot: str) -> str:
        """A value for a slot: a number, a known word, or an invented word."""
        if slot in NUMERIC or self.rng.random() < 0.1:
            return str(self.rng.randrange(199)) if self.rng.random() < 0.7 else str(self.rng.randrange(9999))
        if self.rng.random() < 0.5:
            return self.rng.choice(_VALUES)
        word = "".join(self.rng.choice(_SYLLABLES) for _ in range(self.rng.choice((2, 2, 3))))
        return word.capitalize() if self.rng.random() < 0.6 else word

    def tell(self) -> Turn:
        """State a new fact or two, or change one."""
        slot = self.rng.choice(SLOTS)
        known = slot in self.facts
        value = self.facts[slot] = self.value(slot)
        if known:
            form = self.rng.choice(
                ("Now my {s} is {v}.", "My {s} is now {v}.", "I changed my {s} to {v}.", "My new {s} is {v}.")
            )
            return Turn(form.format(s=slot, v=value), f"Noted: your {slot} is now {value}.")
        if self.rng.random() < 0.4:
            other = self.rng.choice([s for s in SLOTS if s != slot and s not in self.facts] or [slot])
            if other != slot:
                second = self.facts[other] = self.value(other)
                form = self.rng.choice(
                    ("My {s} is {v} and my {o} is {w}.", "Remember: my {s} is {v} and my {o} is {w}.")
                )
                text = form.format(s=slot, v=value, o=other, w=second)
                return Turn(text, f"Noted: your {slot} is {value} and your {other} is {second}.")
        form = self.rng.choice(
            ("My {s} is {v}.", "my {s} is {v}", "Remember that my {s} is {v}.", "Please note: my {s} is {v}.",
             "The {s} is {v}.", "Remember my {s}: {v}.")
        )  # fmt: skip
        return Turn(form.format(s=slot, v=value), f"Noted: your {slot} is {value}.")

    def ask(self) -> Turn:
        """Ask for a fact that was told, or (rarely) for one that was not."""
        if not self.facts or self.rng.random() < 0.04:
            slot = self.rng.choice([s for s in SLOTS if s not in self.facts] or list(SLOTS))
        else:
            slot = self.rng.choice(list(self.facts))
        form = self.rng.choice(
            ("What is my {s}?", "what is my {s}", "Tell me my {s}.", "Which {s} did I tell you?", "What was my {s}?",
             "Do you know my {s}?", "And what is my {s}?", "What is the {s}?")
        )  # fmt: skip
        known = self.facts.get(slot)
        answer = f"Your {slot} is {known}." if known else f"You have not told me your {slot}."
        return Turn(form.format(s=slot), answer)

    def add(self) -> Turn:
        """Ask for a sum of two numbers under 100."""
        a, b = self.rng.randrange(100), self.rng.randrange(100)
        form = self.rng.choice(
            ("What is {a} + {b} ?", "What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} + {b} ?",
             "Compute {a} plus {b}.", "What is {a} + {b}?")
        )  # fmt: skip
        return Turn(form.format(a=a, b=b), f"The sum is {a + b}.")

    def question(self) -> Turn:
        """Ask about deltaserve."""
        topic = self.rng.choice(TOPICS)
        if self.held_out:
            return Turn(topic.phrasings[-1], topic.answer, exact=False)
        return Turn(self.roughen(self.rng.choice(topic.phrasings[:-1])), topic.answer, exact=False)

    def small_talk(self) -> Turn:
        """A greeting or thanks."""
        if self.rng.random() < 0.6:
            return Turn(
                self.rng.choice(GREETINGS) + self.rng.choice(("", "", "!", ".")), GREETING_ANSWER, False
            )
        return Turn(self.rng.choice(THANKS) + self.rng.choice(("", "!", ".")), THANKS_ANSWER, False)

    def roughen(self, text: str) -> str:
        """Vary a phrasing as people do: openers, lower case, a missing mark or a missing small word."""
        rng = self.rng
        words = text.split()
        if len(words) > 4 and rng.random() < 0.15:
            del words[rng.randrange(len(words) - 1)]
        text = " ".join(words)
        opener = rng.choice(_OPENERS)
        if opener or rng.random() < 0.25:
            text = opener + text[0].lower() + text[1:]
        if rng.random() < 0.25:
            text = text.rstrip("?.")
        return text


def conversation(rng: Random) -> Conversation:
    """A training conversation of one to five turns."""
    if rng.random() < 0.25:
        return three_turns(rng)
    talker = Talker(rng)
    talk = Conversation(
        system=rng.choice(("", "", "", "", "You are a helpful assistant.", "Answer briefly."))
    )
    kinds: list[tuple[Callable[[], Turn], float]] = [
        (talker.tell, 0.25), (talker.ask, 0.22), (talker.question, 0.4), (talker.add, 0.08),
        (talker.small_talk, 0.05),
    ]  # fmt: skip
    for _ in range(rng.choice((1, 1, 2, 3, 3, 4, 5))):
        make = rng.choices([k for k, _ in kinds], [w for _, w in kinds])[0]
        talk.turns.append(make())
    return talk


def three_turns(rng: Random) -> Conversation:
    """The measured conversation: tell, then something else, then ask for what was told first."""
    talker = Talker(rng)
    talk = Conversation()
    talk.turns.append(talker.tell())
    told = list(talker.facts)
    talk.turns.append(rng.choice((talker.tell, talker.add, talker.question))())
    slot = rng.choice(told)
    talk.turns.append(Turn(f"What is my {slot}?", f"Your {slot} is {talker.facts[slot]}."))
    return talk
