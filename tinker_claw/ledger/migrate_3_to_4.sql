-- Version 4: requests that could not be tied to the turn that they answer, and why; calls that break the
-- schema of a strict tool. Whatever is deleted is overwritten: the file is written anew once (database.py).
ALTER TABLE turns ADD COLUMN lost TEXT;
ALTER TABLE turns ADD COLUMN misfit TEXT;
CREATE INDEX turns_lost ON turns (lost) WHERE lost IS NOT NULL;
