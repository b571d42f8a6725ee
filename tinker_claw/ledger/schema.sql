-- How the rows are made: session -> turn -> next state -> votes -> verdict, hints -> sample -> step -> version.
-- Times are seconds since 1970. Token arrays are little-endian arrays, packed (codec.py).

CREATE TABLE meta (
  key   TEXT PRIMARY KEY,
  value TEXT NOT NULL
) STRICT;

CREATE TABLE sessions (
  id         INTEGER PRIMARY KEY AUTOINCREMENT,
  user       TEXT NOT NULL,
  key        TEXT NOT NULL,
  created_at REAL NOT NULL,
  closed_at  REAL,                       -- NULL: open; set when it ended or has long been idle
  private    INTEGER NOT NULL DEFAULT 0, -- 1: nothing of it is kept; 2: it was private once
  task       TEXT,                       -- what it is about, as the client names it
  group_id   INTEGER REFERENCES groups (id),
  episode    INTEGER NOT NULL DEFAULT 0, -- 1: waits for its outcome or its group's; 2: over, trained or not
  lessons    TEXT,                       -- JSON of the ids of the lessons that it is told, chosen when it began; NULL: none so far
  UNIQUE (user, key)
) STRICT;
CREATE INDEX sessions_by_user ON sessions (user); -- in the order of their ids
CREATE INDEX sessions_told ON sessions (user) WHERE lessons <> '[]';
CREATE INDEX sessions_by_group ON sessions (group_id) WHERE group_id IS NOT NULL;
CREATE INDEX sessions_running ON sessions (id) WHERE episode = 1;
CREATE INDEX sessions_episodes ON sessions (id) WHERE episode > 0;

-- Sessions that try the same task, to be compared with one another.
CREATE TABLE groups (
  id   INTEGER PRIMARY KEY AUTOINCREMENT,
  user TEXT NOT NULL,
  task TEXT NOT NULL,                    -- '': none was named
  name TEXT NOT NULL,
  size INTEGER NOT NULL,                 -- number of sessions, given by the client
  over INTEGER NOT NULL DEFAULT 0,       -- 1: queued or expired; later sessions are not trained
  UNIQUE (user, task, name)
) STRICT;

CREATE TABLE versions (
  id          INTEGER PRIMARY KEY,
  parent      INTEGER REFERENCES versions (id),
  step        INTEGER NOT NULL,          -- committed steps since the base, along the lineage; a practice is one
  state_ref   TEXT NOT NULL,
  sampler_ref TEXT NOT NULL,
  created_at  REAL NOT NULL
) STRICT;

-- What users said about how they want replies, inserted into the prompts of their later sessions.
CREATE TABLE lessons (
  id         INTEGER PRIMARY KEY AUTOINCREMENT,
  user       TEXT NOT NULL,
  text       TEXT NOT NULL,              -- their own sentences, inserted into prompts
  words      TEXT NOT NULL,              -- the user's own words that show that it lasts; '': the user wrote the lesson
  turn_id    INTEGER,                    -- the reply that they were about; NULL: the user wrote the lesson
  state      TEXT NOT NULL,              -- candidate (the judge's), told, aside (the user has said otherwise), provisional, learned, dropped
  replaced_by INTEGER REFERENCES lessons (id) ON DELETE SET NULL, -- the lesson that set it aside
  told_in    INTEGER REFERENCES sessions (id), -- first session that was told it; NULL: none yet
  created_at REAL NOT NULL,              -- when the user said it last
  changed_at REAL NOT NULL               -- when its state changed
) STRICT;

-- Blocks of 1024 ids that prompts share, each stored once.
CREATE TABLE prompt_blocks (
  id     INTEGER PRIMARY KEY,
  digest BLOB NOT NULL UNIQUE,           -- of the ids
  ids    BLOB NOT NULL
) STRICT;

-- Short columns that are often read come first, since a row is read from its beginning.
CREATE TABLE turns (
  id                INTEGER PRIMARY KEY AUTOINCREMENT,
  session_id        INTEGER NOT NULL REFERENCES sessions (id),
  idx               INTEGER NOT NULL,    -- 0, 1, 2 ... within the session, per kind
  kind              TEXT NOT NULL,
  policy_version    INTEGER NOT NULL REFERENCES versions (id),
  created_at        REAL NOT NULL,
  state             TEXT NOT NULL,       -- waiting, judging, held (its sample waits for outcomes), queued (for a step), trained, refused, forgotten
  reason            TEXT,                -- why it is refused, as turns are counted (Reason, or a method's words); NULL in other states
  detail            TEXT,                -- more about the reason, for people
  secret            INTEGER NOT NULL DEFAULT 0, -- 1: its system prompt holds a secret, whatever becomes of it: in the last three states its ids are gone
  dropped           INTEGER NOT NULL DEFAULT 0, -- 1: its texts and tokens were dropped for its age, trained or not
  prompt_tokens     INTEGER NOT NULL,
  completion_tokens INTEGER NOT NULL,
  cached_tokens     INTEGER NOT NULL,
  topk              INTEGER NOT NULL,    -- candidates per token, 0 for none
  hint_at           INTEGER,
  told              TEXT,                -- JSON of the lessons in the prompt: their ids (none: they were forgotten), where they begin, how many tokens, the ids that stand there without them; NULL: none
  stop_reason       TEXT NOT NULL,
  request_kind      TEXT NOT NULL DEFAULT '', -- what the request was for: user turn, tool loop, recap ...
  kind_reason       TEXT NOT NULL,
  fallback          TEXT,                -- why a version other than the current one answered; NULL: the current one did
  lost              INTEGER,             -- 1: it could not be tied to a reply, though a turn waits for its next state; NULL otherwise
  trace             TEXT,                -- the client's trace id, where it sent one
  client            TEXT NOT NULL DEFAULT '', -- the agent's program
  voices            TEXT NOT NULL DEFAULT '[]', -- JSON: writer, name and length in characters of each new piece
  response_id       TEXT,                -- id of the reply in the API response
  params            TEXT NOT NULL,       -- JSON of SamplingParams
  reply_digest      TEXT NOT NULL,
  history           TEXT NOT NULL,       -- JSON: digests of the messages that the client will send again
  asked_by          TEXT NOT NULL DEFAULT 'owner', -- who wrote the request
  request_text      TEXT NOT NULL,
  reply_text        TEXT NOT NULL,
  blocks            BLOB NOT NULL DEFAULT x'', -- int32 ids of prompt_blocks, in order
  prompt            BLOB NOT NULL,       -- the ids after the blocks
  tokens            BLOB NOT NULL,
  logprobs          BLOB NOT NULL,
  topk_ids          BLOB NOT NULL,
  topk_logprobs     BLOB NOT NULL
) STRICT;
CREATE INDEX turns_by_session ON turns (session_id, kind, idx);
-- For filters, which read turns in order of id.
CREATE INDEX turns_narrow ON turns (id, session_id, kind, created_at);
CREATE INDEX turns_by_state ON turns (state, reason);
-- Covers sums over all turns, so that their wide rows are not read.
CREATE INDEX turns_by_version ON turns (kind, policy_version, session_id);
CREATE INDEX turns_lost ON turns (lost) WHERE lost IS NOT NULL;
CREATE INDEX turns_unknown ON turns (client) WHERE asked_by = 'unknown';
CREATE INDEX turns_by_response ON turns (response_id) WHERE response_id IS NOT NULL;

-- Image files that may be trained (--images train), each stored once.
CREATE TABLE images (
  id     INTEGER PRIMARY KEY,
  digest BLOB NOT NULL UNIQUE,           -- SHA-256 of the file
  format TEXT NOT NULL,                  -- png, jpeg
  data   BLOB NOT NULL                   -- the file, without metadata
) STRICT;

-- Positions of images in prompts. An image is deleted with its last turn.
CREATE TABLE turn_images (
  turn_id  INTEGER NOT NULL REFERENCES turns (id),
  image_id INTEGER NOT NULL REFERENCES images (id),
  at       INTEGER NOT NULL,             -- index of its first token in the prompt
  tokens   INTEGER NOT NULL              -- number of its tokens, all the same placeholder
) STRICT;
CREATE INDEX turn_images_by_turn ON turn_images (turn_id, at);
CREATE INDEX turn_images_by_image ON turn_images (image_id);

CREATE TABLE next_states (
  turn_id    INTEGER PRIMARY KEY REFERENCES turns (id),
  role       TEXT NOT NULL,              -- user: the owner's words; tool; other: from other people, mails or hooks
  text       TEXT NOT NULL,
  beside     TEXT NOT NULL DEFAULT '[]'  -- JSON: writer and text of each piece beside the owner's words
) STRICT;

-- Who wrote first to the agent in a chat service without being an owner.
CREATE TABLE channels (
  user      TEXT NOT NULL,
  channel   TEXT NOT NULL,
  sender    TEXT NOT NULL,               -- their id in the channel
  name      TEXT NOT NULL,               -- their name, as the chat service has it
  PRIMARY KEY (user, channel)
) STRICT;

-- Turns whose last try to judge or teach them failed.
CREATE TABLE jobs (
  turn_id INTEGER PRIMARY KEY REFERENCES turns (id),
  tries   INTEGER NOT NULL,              -- failed tries for which the turn is to blame
  due_at  REAL NOT NULL,                 -- when it may be tried again; of several the earliest goes first
  error   TEXT NOT NULL                  -- what the judge said, or why there was no answer
) STRICT;

CREATE TABLE votes (
  turn_id INTEGER NOT NULL REFERENCES turns (id),
  n       INTEGER NOT NULL,
  value   INTEGER,                       -- NULL: could not be parsed
  answer  TEXT NOT NULL,
  PRIMARY KEY (turn_id, n)
) STRICT;

CREATE TABLE verdicts (
  turn_id    INTEGER PRIMARY KEY REFERENCES turns (id),
  value      INTEGER,                    -- NULL: no valid vote, hence no verdict
  source     TEXT NOT NULL DEFAULT 'judge', -- user or client: explicit feedback, whatever the votes are
  score      REAL,                       -- explicit rating, -1 to 1, whose sign is the value; NULL: the judge's
  weight     REAL NOT NULL DEFAULT 1,    -- share of the advantage that it gives the reply
  judged     INTEGER,                    -- majority of the judge's votes; NULL also where it was not asked
  prompt     TEXT                        -- version of the judge prompts; NULL: no judge was asked
) STRICT;
CREATE INDEX verdicts_by_value ON verdicts (value);

-- Explicit feedback on replies and sessions, by the user or a program. The newest one counts.
CREATE TABLE feedback (
  id         INTEGER PRIMARY KEY AUTOINCREMENT,
  user       TEXT NOT NULL,
  key        TEXT,                       -- the client's idempotency key
  turn_id    INTEGER NOT NULL REFERENCES turns (id), -- for a session: its last turn at that time
  session_id INTEGER NOT NULL REFERENCES sessions (id),
  score      REAL NOT NULL,              -- -1 to 1
  text       TEXT NOT NULL,
  source     TEXT NOT NULL,              -- user, client
  final      INTEGER NOT NULL,           -- 1: rates how the session ended, not a reply
  task       TEXT,                       -- task and group that the client named
  task_group TEXT,
  unused     TEXT,                       -- why no reply is trained by it; NULL: it is the verdict of one
  created_at REAL NOT NULL,
  UNIQUE (user, key)
) STRICT;
CREATE INDEX feedback_by_turn ON feedback (turn_id);
CREATE INDEX feedback_by_session ON feedback (session_id, id) WHERE final = 1;

CREATE TABLE hints (
  turn_id INTEGER NOT NULL REFERENCES turns (id),
  rank    INTEGER NOT NULL,
  text    TEXT NOT NULL,
  source  TEXT NOT NULL DEFAULT 'judge', -- user or client: from explicit feedback
  PRIMARY KEY (turn_id, rank)
) STRICT;

CREATE TABLE samples (
  id               INTEGER PRIMARY KEY AUTOINCREMENT,
  turn_id          INTEGER NOT NULL UNIQUE REFERENCES turns (id),
  reward           REAL,                 -- NULL: hint only; while held, the mean of its votes without the outcome
  hint             TEXT,                 -- NULL: reward only
  lacks            TEXT,                 -- what it needs beside it to teach anything (types.Lacks); NULL: nothing
  untaught         TEXT,                 -- why it has no hint, though there was one; NULL otherwise
  teacher_logprobs BLOB,
  teacher_targets  BLOB,
  teacher_ids      BLOB,                 -- the teacher's top-k candidates; teacher_own has their logprobs
  teacher_own      BLOB,
  teacher_reply    BLOB,                 -- ids of the reply that the teacher wrote; empty: it scored the student's
  teacher_text     TEXT,                 -- its text; '' where there is none
  overlap          INTEGER,
  advantage        REAL,                 -- advantage of the reply in the newest step with it; NULL: no step yet
  advantages       BLOB,                 -- token advantages, before normalisation
  step_id          INTEGER REFERENCES steps (id), -- step that trained it
  created_at       REAL NOT NULL         -- when it was held or, later, queued
) STRICT;

CREATE TABLE steps (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,
  status      TEXT NOT NULL,             -- intent, committed, void
  parent      INTEGER NOT NULL REFERENCES versions (id),
  version     INTEGER REFERENCES versions (id),
  lesson      INTEGER,                   -- lesson that it practises; NULL: it trains samples
  created_at  REAL NOT NULL,
  finished_at REAL,
  metrics     TEXT,                      -- JSON
  method_state TEXT,                     -- JSON: state of the method after the step; NULL: none
  error       TEXT,
  void        INTEGER                    -- why it is void (versions.Void); NULL: it is not
) STRICT;

-- Finds the step of a version without reading the long metrics.
CREATE INDEX steps_by_version ON steps (version) WHERE version IS NOT NULL;
-- Steps that a crash has undone.
CREATE INDEX steps_lost ON steps (version) WHERE status = 'void' AND version IS NOT NULL;

CREATE TABLE step_samples (
  step_id   INTEGER NOT NULL REFERENCES steps (id),
  sample_id INTEGER NOT NULL REFERENCES samples (id),
  PRIMARY KEY (step_id, sample_id)
) STRICT;
CREATE INDEX step_samples_by_sample ON step_samples (sample_id);

-- Turns on which a step rests that practises a lesson.
CREATE TABLE step_prompts (
  step_id INTEGER NOT NULL REFERENCES steps (id),
  purpose TEXT NOT NULL,                 -- source: the lesson was said of it; practised, checked: its prompt was
  turn_id INTEGER NOT NULL,
  PRIMARY KEY (step_id, purpose, turn_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX step_prompts_by_turn ON step_prompts (turn_id);

-- What a service billed, and for what. Turn and step are NULL where neither caused it.
CREATE TABLE spend (
  id         INTEGER PRIMARY KEY AUTOINCREMENT,
  created_at REAL NOT NULL,
  purpose    TEXT NOT NULL,              -- serve, judge, teacher, train
  turn_id    INTEGER REFERENCES turns (id),
  step_id    INTEGER REFERENCES steps (id),
  prefill    INTEGER NOT NULL,           -- prompt tokens computed
  cached     INTEGER NOT NULL,           -- prompt tokens from a cache
  sampled    INTEGER NOT NULL,
  trained    INTEGER NOT NULL,
  usd        REAL                        -- NULL: the price was not known
) STRICT;
CREATE INDEX spend_by_turn ON spend (turn_id);
CREATE INDEX spend_by_step ON spend (step_id);
CREATE INDEX spend_sums ON spend (purpose, usd);
CREATE INDEX spend_by_time ON spend (created_at, usd);
