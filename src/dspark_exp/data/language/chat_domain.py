"""Small talk: at every phrase several continuations of several tokens are equally good.

In: Choices. Out: (prompt, answer) pairs. A drafter that predicts positions independently splices
"of" from "of course" with "problem" from "no problem"; one that conditions on the sampled token does not.
"""

from __future__ import annotations

from dspark_exp.data.language.choices import Choices

_TOPICS = (
    "garden", "kitchen", "bicycle", "holiday", "painting", "puppy", "dinner", "piano", "balcony", "essay",
    "camera", "workshop", "birthday", "concert", "picnic", "journey", "library", "sweater", "novel", "lesson",
    "orchard", "letter", "meeting", "sailboat", "recipe", "museum", "blanket", "market", "lantern", "poem",
)  # fmt: skip
_OPENINGS = (
    "of course,", "no problem at all,", "with great pleasure,", "my friend, gladly,", "sure thing,",
    "you bet,", "it is always nice to hear that,", "oh how lovely,", "well now,", "let me be honest with you,",
    "good question indeed,", "thanks for asking,",
)  # fmt: skip
_OFFERS = (
    "I can help you with the {}", "let me think about the {}", "we should look at the {} together",
    "there is much to say about a {}", "people often ask me about the {}", "nothing beats a good {}",
)  # fmt: skip
_REASONS = (
    "because every day brings something new", "since small steps lead far", "and patience will pay off",
    "as long as you enjoy it", "so take your time with it", "even when the weather turns bad",
    "though it may feel hard at first", "while the coffee is still warm",
    "if only the neighbors agree", "and nobody has to know", "for that is what counts in the end",
    "unless you would rather sleep", "before the leaves begin to fall", "after all it is your choice",
)  # fmt: skip
_CLOSINGS = (
    "tell me more whenever you like.", "have a wonderful evening.", "all the best for you and yours.",
    "what would you like to know?", "good luck and see you soon.", "just ask if anything is unclear.",
    "may I suggest a short break?", "keep going, you are doing fine.",
    "send me a postcard from there.", "let us try again tomorrow.", "do not worry about it too much.",
    "call your sister and tell her.", "how does that sound to you?", "that would make a fine story.",
)  # fmt: skip
_TIPS = (
    "start early in the morning", "write down three simple goals", "ask an old neighbor for advice",
    "buy only what you really need", "practice for ten quiet minutes", "share the work among friends",
    "keep notes in a small blue book", "never rush the last part",
    "borrow the tools from a museum", "listen to slow music at night", "bake bread for the whole street",
    "count the steps on your way", "paint the old door yellow", "trust the first idea you had",
)  # fmt: skip
_MOODS = (
    "happy", "tired", "nervous", "proud", "curious", "bored", "excited", "calm",
    "lonely", "hopeful", "grateful", "worried", "cheerful", "restless", "sleepy", "hungry",
)  # fmt: skip


def thanks(draw: Choices) -> tuple[str, str]:
    """Somebody says thank you and asks for more."""
    topic, mood = draw.one_of(_TOPICS), draw.one_of(_MOODS)
    prompt = f"Thank you, I feel {mood}. Can we talk about the {topic}?"
    draw.nats = 0.0
    offer = draw.one_of(_OFFERS).format(topic)
    return prompt, f"{draw.one_of(_OPENINGS)} {offer} {draw.one_of(_REASONS)}. {draw.one_of(_CLOSINGS)}"


def advice(draw: Choices) -> tuple[str, str]:
    """Somebody asks for advice and gets two tips."""
    topic, mood = draw.one_of(_TOPICS), draw.one_of(_MOODS)
    prompt = f"Any advice on my {topic}? I am a bit {mood}."
    draw.nats = 0.0
    first, second = draw.two_of(_TIPS)
    return prompt, f"{draw.one_of(_OPENINGS)} {first} and {second}, {draw.one_of(_REASONS)}. {draw.one_of(_CLOSINGS)}"


def small_talk(draw: Choices) -> tuple[str, str]:
    """Somebody shares a feeling and asks for an opinion."""
    topic, mood = draw.one_of(_TOPICS), draw.one_of(_MOODS)
    prompt = f"I feel {mood} today because of the {topic}. What do you think?"
    draw.nats = 0.0
    offer = draw.one_of(_OFFERS).format(topic)
    echo = draw.one_of((f"being {mood} is quite natural,", f"so you feel {mood} today,", f"{mood} people make my day,"))
    return prompt, f"{echo} {offer} {draw.one_of(_REASONS)}. {draw.one_of(_TIPS)}. {draw.one_of(_CLOSINGS)}"
