"""Steps that join several rooms, and the step that a recipe entry describes."""
