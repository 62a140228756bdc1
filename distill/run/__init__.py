"""One training of a recipe: student, text, teacher, snapshots, log and the step that combines them."""
