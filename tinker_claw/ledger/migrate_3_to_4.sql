-- Version 4: requests that could not be tied to the turn that they answer, and why.
ALTER TABLE turns ADD COLUMN lost TEXT;
CREATE INDEX turns_lost ON turns (lost) WHERE lost IS NOT NULL;
