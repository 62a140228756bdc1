"""Tests of the distill room."""
