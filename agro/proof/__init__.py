"""Objectives proved by enumeration: expectations over every group of a policy small enough to write down."""
