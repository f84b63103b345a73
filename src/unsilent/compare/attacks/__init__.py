"""Inputs that an adapted model gets wrong while its original stays right: how they are searched for, counted and prevented."""
