"""Runs: steps that are saved, kept and resumed by rule."""
