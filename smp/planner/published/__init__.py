"""Published runs of other trainers, and the errors of the planner's predictions for them."""
