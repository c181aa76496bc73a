from tests.rollouts.play_setup import *  # noqa: F403
