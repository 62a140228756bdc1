"""Running a recipe: the plan, the steps, the reload check."""
