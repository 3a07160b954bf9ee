"""The page that a newcomer starts on."""

import inspect

from examples import nano


def test_the_page_for_newcomers_trains_and_fits_on_a_page(capsys):
    rewards = nano.train(steps=3)
    assert len(rewards) == 3 and all(0 < reward < 1 for reward in rewards)
    assert "step 3/3 | reward" in capsys.readouterr().out
    assert len(inspect.getsource(nano).splitlines()) <= 150
