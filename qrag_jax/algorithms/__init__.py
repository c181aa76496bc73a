"""Pure update steps and the return estimators they share."""
