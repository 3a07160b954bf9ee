"""The reward in docs/first-hour.md: 0.5 for at most 20 words, and 0.5 for a word of the message."""


def short(prompts: list[str], completions: list[str], **columns) -> list[float]:
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        is_short = len(completion.split()) <= 20
        topic_words = [word.strip(".,?!") for word in prompt.lower().split() if len(word) > 4]
        is_on_topic = any(word in completion.lower() for word in topic_words)
        rewards.append(0.5 * is_short + 0.5 * is_on_topic)
    return rewards
