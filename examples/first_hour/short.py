"""The reward in docs/first-hour.md: 0.5 for at most 20 words, and 0.5 for a word of the message."""


def short(prompts: list[str], completions: list[str], **columns) -> list[float]:
    topics = [
        [word.strip(".,?!") for word in prompt.lower().split() if len(word) > 4]
        for prompt in prompts
    ]
    on_topic = [
        any(word in text.lower() for word in topic)
        for topic, text in zip(topics, completions, strict=True)
    ]
    return [
        (len(text.split()) <= 20) / 2 + is_on_topic / 2
        for text, is_on_topic in zip(completions, on_topic, strict=True)
    ]
