from tests.rollouts.token_setup import *  # noqa: F403
