"""The interface of a participant, and the values that it deals with."""
