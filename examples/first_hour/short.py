"""The reward of docs/first-hour.md: 0.5 for at most 20 words, 0.5 for a word from the message."""


def short(prompts, completions, **columns):
    topics = [
        [word.strip(".,?!") for word in prompt.lower().split() if len(word) > 4]
        for prompt in prompts
    ]
    on_topic = [
        any(word in text.lower() for word in topic)
        for topic, text in zip(topics, completions, strict=True)
    ]
    return [
        (len(text.split()) <= 20) / 2 + its / 2
        for text, its in zip(completions, on_topic, strict=True)
    ]
