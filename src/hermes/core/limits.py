"""Every limit and fixed wait, with its unit in its name. Exceeding one is an error; nothing is truncated silently."""

# The HTTP client
# Of an event of a stream, or of a provider's whole answer: in memory it takes several times as much.
EVENT_BYTES_MAX = 4 * 1024 * 1024
ANSWER_BYTES_MAX = 64 * 1024 * 1024
CONNECT_S_MAX = 30.0
# Of an answer: how long its head may be, and how much of it may lie unread before the sender is made to wait.
HEAD_BYTES_MAX = 64 * 1024
ANSWER_AHEAD_BYTES_MAX = 256 * 1024
# How long idle connections are kept open, and resolved names cached.
KEPT_ALIVE_S = 30.0
NAMES_KEPT_S = 60.0
# How long an address of several is waited for before the next is tried too.
NEXT_ADDRESS_S = 0.25

# Inflating what is compressed. What is small enough may be as repetitive as it likes.
INFLATED_RATIO_MAX = 100
INFLATED_SMALL_BYTES = 1024
INFLATED_PIECE_BYTES_MAX = 64 * 1024

# Readers of a log
QUEUE_EVENTS_MAX = 1024
QUEUE_BYTES_MAX = 1024 * 1024
AHEAD_BYTES_MAX = 64 * 1024
# How long, and how much, text may wait to be saved: without a journal that has it, and with one.
PARTIAL_S_MAX = 0.25
JOURNALED_S_MAX = 300.0
PARTIAL_CHARS_MAX = 256 * 1024
# Where a text was cut is compressed from this size on.
CUTS_COMPRESSED_BYTES_MIN = 1024
# How long the first events of a message or call may wait for those that follow; and the start of a turn whose client waits
# for the whole answer and keeps the conversation itself.
HELD_S_MAX = 0.005
START_HELD_S_MAX = 0.1
# A file of the journal: beyond the first size its texts are saved so that it can go, beyond the second it goes as soon
# as nothing in it is needed.
JOURNAL_FILE_BYTES_MAX = 4 * 1024 * 1024
JOURNAL_REUSED_BYTES_MAX = 64 * 1024
JOURNAL_RETRY_S = 5.0
PAGE_EVENTS_MAX = 512

# Leases, and how long an end may take
LEASE_TTL_S = 30.0
LEASE_RENEW_S = 10.0
LEASES_RENEWED_MAX = 200
LEASE_POLL_S = 0.25
# How long a request waits for the store to count it among those of its owner at all replicas, and for how long a replica
# counts for itself after it has waited in vain.
OWNER_LIMITS_S_MAX = 10.0
OWNER_LIMITS_AWAY_S = 10.0
# How often leases are looked at that could not be renewed, where other hosts can take them over.
LEASE_CHECK_S = 1.0
CLOSE_S_MAX = 5.0
COMING_S_MAX = 1.0
TRACES_SENT_S_MAX = 2.0

# Other processes of the home: how long an answer of theirs may take, how long one that is followed may say nothing
# before it is made sure that it still has the run, and how many runs are remembered that only they know.
PEER_ANSWER_S_MAX = 5.0
PEER_IDLE_S = 10.0
PEER_BACKLOG = 1024
PEER_FRAME_BYTES_MAX = 256 * 1024 * 1024
PEER_RUNS_KNOWN_MAX = 1_000

# NATS: how long a start may wait for it, how often and how long a lost connection is tried, and how long it may be silent;
# one message, and what may wait to be sent; the stream of live events.
NATS_CONNECT_S_MAX = 3.0
NATS_RECONNECT_S = 0.5
NATS_PING_S = 5.0
NATS_API_S_MAX = 5.0
NATS_SYNC_S_MAX = 1.0
NATS_EVENT_BYTES_MAX = 256 * 1024
NATS_PART_BYTES = 512 * 1024
NATS_OUTGOING_EVENTS_MAX = 50_000
NATS_SEND_EVERY_S = 0.01
NATS_EVENTS_KEPT_S = 3600.0
NATS_EVENTS_BYTES_MAX = 256 * 1024 * 1024
NATS_FETCHED_MAX = 500
NATS_PARTS_KEPT_S = 30.0
# Replicas: how often each sends a heartbeat, after which time without one it counts as dead, and how often changed counts
# are sent at most.
REPLICA_BEAT_S = 2.0
REPLICA_GONE_S = 6.5
REPLICA_COUNTS_S = 0.01
REPLICA_LOOK_S = 0.5
# The queue of runs: how long a delivery lasts without being extended, how often it is, when a run that nobody was offered is
# put again, and when one comes again whose session was busy.
QUEUE_ACK_S = 30.0
QUEUE_EXTEND_S = 10.0
QUEUE_LOST_S = 5.0
QUEUE_BUSY_S = 0.5

# Workers of a server: how many there may be, how long the first wait before one that died is started again is and how
# long it may become, and after which time one counts as steady.
WORKERS_MAX = 32
WORKER_RESTART_S = 0.25
WORKER_RESTART_S_MAX = 30.0
WORKER_STEADY_S = 60.0
# Numbers that workers share: two for each key with rates, one for each key with a number of turns, one for each profile.
SHARED_ROWS_MAX = 1_024

# Asking a model
ANSWER_CHARS_MAX = 2_000_000
RETRY_AFTER_S_MAX = 600.0
RETRY_WAIT_S_MAX = 60.0
SHORT_RETRY_AFTER_S = 10.0
PROVIDER_WORDS_CHARS_MAX = 500
LARGE_PROMPT_TOKENS = 100_000
STALE_LARGE_S = 300.0
STALE_LOCAL_S = 900.0
PRIMARY_REST_S = 60.0
COMMENTS_STRETCH = 3
# Lines of a stream that bring nothing of an answer.
QUIET_LINES_MAX = 100_000
MODEL_WAITING_S = 30.0
INVALID_STEPS_MAX = 3
AUXILIARY_TRIES_MAX = 3
TITLE_CHARS_MAX = 60
OVERLAP_CHARS_MIN = 12
OVERLAP_CHARS_MAX = 200
SHRUNK_PIXELS_MAX = 1024

# Lists of models
MODEL_LIST_KEPT_S = 86_400.0
MODEL_LIST_RETRY_S = 3_600.0
MODEL_LIST_FETCH_S_MAX = 15.0
MODEL_LIST_BYTES_MAX = 8 * 1024 * 1024

# The prompt
LEAN_WINDOW_TOKENS = 16_384
SKILLS_CHARS_MAX = 4_000
PROMPT_FILE_BYTES_MAX = 200_000
PROJECT_CHARS_MAX = 20_000
EMBEDDED_PROJECT_CHARS_MAX = 800
PROJECT_WINDOW_SHARE = 0.06
BYTES_PER_TOKEN = 3.6
IMAGE_TOKENS = 1_200
IMAGE_TOKENS_MIN = 85
PIXELS_PER_TOKEN = 750
BYTES_PER_IMAGE_TOKEN = 250
SUMMARY_TOKENS_MAX = 10_000
THOUGHT_CHARS_MAX = 500
REASONING_EXCERPT_CHARS_MAX = 2_000
# A tool call in the text of an answer: how much of it decides that it is one, and how long it may become.
LEAKED_CALL_HEAD_CHARS_MAX = 120
LEAKED_CALL_CHARS_MAX = 1_000_000

# Tools
TOOL_TIMEOUT_S = 120.0
PREVIEW_CHARS_MAX = 200
STUBBORN_S_MAX = 3.0
THREAD_IDLE_S_MAX = 30.0
NEAREST_NAMES_MAX = 5
FAULT_CHARS_MAX = 400
# Of a schema with every reference in it replaced by what it refers to.
SCHEMA_UNFOLDED_NODES_MAX = 200_000
SCHEMA_PATTERN_STEPS_MAX = 100_000
TODO_ITEMS_MAX = 256
TODO_CHARS_MAX = 4000
CLARIFY_CHARS_MAX = 2000
CLARIFY_CHOICES_MAX = 4

# Secrets
SECRET_CHARS_MIN = 8
SECRET_HELD_CHARS_MIN = 6

# The store
BUSY_TIMEOUT_S = 10.0
BUSY_S_MAX = 30.0
BUSY_WAIT_S_MIN = 0.0005
BUSY_WAIT_S_MAX = 0.01
BATCH_JOBS_MAX = 256
ROWS_COUNTED_S = 60.0
FREE_BYTES_MIN = 256 * 1024
WAL_KEPT_BYTES_MAX = 64 * 1024 * 1024
# PostgreSQL: connections of an event loop and of threads; how long one is waited for, stays idle, works on a statement,
# is waited for to answer, and stays idle in a transaction; how often a transaction that others were in the way of is run
# again, and the pauses before that. Whoever waits in a thread, such as a request, gives up a server that is away earlier
# than a run does.
PG_POOL_MIN, PG_POOL_MAX, PG_THREAD_POOL_MAX = 4, 20, 8
PG_CONNECT_S_MAX = 5
PG_IDLE_S_MAX = 300
PG_STATEMENT_S_MAX = 30
PG_ANSWER_S_MAX = 35.0
PG_IDLE_TRANSACTION_S_MAX = 10
PG_CHECK_S_MAX = 1.5
PG_AWAY_S_MAX = 8.0
PG_CONFLICTS_MAX = 20
# Statements that a connection keeps prepared, and how often one is used before it is.
PG_PREPARED_MAX, PG_PREPARED_USES_MIN = 300, 3
# How often the only server of a database looks whether it still is, and how long another one waits for its end.
PG_SERVER_LOCK_EVERY_S = 2.0
PG_SERVER_LOCK_WAIT_S = 2.0
PG_RETRY_WAIT_S_MIN, PG_RETRY_WAIT_S_MAX = 0.002, 0.5
# Moving a store: rows and bytes of a batch, and how long connections that were just closed may still be seen.
MIGRATE_BATCH_ROWS, MIGRATE_BATCH_BYTES = 1000, 4 * 1024 * 1024
MIGRATE_USERS_S_MAX, MIGRATE_USERS_POLL_S = 3.0, 0.05
# "All rows", where a statement wants a number.
SQL_ROWS_MAX = 2**62
# After so many changed rows the log of changes is folded into the file by a thread of its own; at so many pages by
# whoever writes.
WAL_ROWS = 8_000
WAL_PAGES_MAX = 16_000
# What a reader knows of the file is of no use any more once somebody has written.
READER_CACHE_KB = 1_000
UPKEEP_IDLE_S = 2.0
UPKEEP_BATCHES = 500
UPKEEP_STEP_S_MAX = 0.05
# Work that is done in many steps: how long each goes on, the pause between two, and after how many of them the log of
# changes is folded into the file.
UPKEEP_STEP_S = 0.003
UPKEEP_PAUSE_S = 0.02
UPKEEP_STEPS_LOGGED = 32
MERGED_PAGES_AT_ONCE = 4
FREE_PAGES_KEPT_MIN = 64
# A file of before that is no larger is written anew when it is opened, so that it gives space back from then on.
VACUUM_AT_OPENING_BYTES_MAX = 16 * 1024 * 1024
LOG_EMPTIED_TRIES = 20
LOG_EMPTIED_WAIT_S = 0.5
SESSION_ID_CHARS_MAX = 256
SESSION_TITLE_CHARS_MAX = 100
END_REASON_CHARS_MAX = 200
PREVIEW_OF_SESSION_CHARS = 60
DATA_URL_CHARS_MAX = 4096
SEARCHED_CHARS_MAX = 16_384
QUERY_CHARS_MAX = 2048
QUERY_TERMS_MAX = 32
# Searches and exports have few connections and threads of their own, which give way to the rest of the server.
SLOW_READERS_MAX = 2
SLOW_READERS_NICENESS = 5
# From the request to the answer, waiting included.
SLOW_READ_S_MAX = 30.0
# A statement with a time limit looks at the clock after so many of its steps.
PROGRESS_STEPS = 50_000
SEARCH_S_MAX = 3.0
COUNT_S_MAX = 0.03
SEARCH_CONTEXT_CHARS = 200
SNIPPET_TOKENS = 32
SORTED_MATCHES_MAX = 1000
CHOSEN_ROWS_MAX = 20_000
CHOSEN_SESSIONS_MAX = 500
BOUND_SESSIONS_MAX = 16
BOUND_ROWS_MAX = 20_000
BOUND_TURN_ROWS_MAX = 2_000
IMPORT_SESSIONS_MAX = 500
IMPORT_ROWS_MAX = 10_000
IMPORT_BYTES_MAX = 25 * 1024 * 1024
IMPORT_ROWS_AT_ONCE_MAX = 100_000
# The conversations in an export of another program, unpacked.
FOREIGN_EXPORT_BYTES_MAX = 512 * 1024 * 1024
PREFIXES_MAX = 4
COMPACTIONS_KEPT_S = 30 * 86_400.0
PENDING_CALLS_KEPT_S = 86_400.0
IDEMPOTENCY_KEPT_S = 86_400.0
UNRECORDED_KEPT_S = 86_400.0
IDEMPOTENCY_RECORDS_MAX = 100_000
IDEMPOTENCY_KEY_CHARS_MAX = 255
SWEEP_BATCH_ROWS = 500
PROMPT_USE_NOTED_S = 3600.0
QUICK_CHECK_S_MAX = 5.0
RESUME_SEQ_STEP = 4096
RESUME_SCAN_S = 30.0
# The same where other hosts may have left runs: within 40 seconds they are to go on.
REPLICA_SCAN_S = 5.0
RESUMES_MAX = 3
STORE_POLL_S = 0.5
CONTROL_POLL_S = 1.0

# The HTTP server
BODY_S_MAX = 60.0
# A body larger than this is received into a file; all such bodies together have so much room once they are read.
BODY_MEMORY_BYTES_MAX = 1024 * 1024
BODIES_MEMORY_BYTES_MAX = 256_000_000
BODIES_WAIT_S_MAX = 30.0
HEADERS_S_MAX = 10.0
HEADER_BYTES_MAX = 16 * 1024
JSON_DEPTH_MAX = 100
# Of one object of a body; and of all objects and arrays of a body, fields and items together.
JSON_FIELDS_MAX = 1_000
JSON_VALUES_MAX = 500_000
IGNORED_BYTES_MAX = 512
# Of an error's text, with what it quotes of a request: the beginning and the end of a longer one are shown.
ERROR_BEGIN_CHARS_MAX = 500
ERROR_END_CHARS_MAX = 200
OUTCOME_CHARS_MAX = 200
RESULT_SHOWN_CHARS_MAX = 20_000
HIT_SHOWN_CHARS_MAX = 300
MESSAGES_MAX = 10_000
CONTENT_PARTS_MAX = 1000
CLIENT_TOOLS_MAX = 128
FUNCTION_NAME_CHARS_MAX = 64
# Of an uploaded file, with room for a number before it: file systems take 255.
UPLOAD_NAME_BYTES_MAX = 200
STOP_STRINGS_MAX = 4
METADATA_PAIRS_MAX = 16
METADATA_KEY_CHARS_MAX = 64
METADATA_CHARS_MAX = 512
SESSION_KEY_CHARS_MAX = 256
USER_ID_CHARS_MAX = 128
TRUNCATED_MESSAGES = 100
QUEUE_POLL_S = 0.02
INLINE_IMAGE_BYTES_MAX = 5 * 1024 * 1024
OUTGOING_BYTES_MAX = 256 * 1024 * 1024
MEDIA_TAG_CHARS_MAX = 4_200
MEDIA_PIECE_CHARS = 64 * 1024
SOCKET_S_MAX = 3600.0
SOCKET_PING_S = 20.0
SOCKET_QUEUE_MAX = 8

# Answers of tools
SPILLED_CHARS_MIN = 2_000
SPILL_PREVIEW_CHARS = 1_500
FRAMED_CHARS_MIN = 32
# Longer answers are searched for secrets in a thread.
REDACTED_AT_ONCE_CHARS_MAX = 10_000
# What goes through more messages than these is done in a thread.
MESSAGES_AT_ONCE_MAX = 500
# Items of a Responses input that are read, and calls of one message that are prepared, before others have their turn.
ITEMS_AT_ONCE_MAX = 100
# Larger bodies are read as JSON in a thread.
BODY_AT_ONCE_BYTES_MAX = 100_000
SESSION_STATES_MAX = 1_000

# Jobs
JOB_LOOK_S = 2.0
JOB_CLAIM_S = 60.0
JOB_NAME_CHARS_MAX = 200
JOB_PROMPT_CHARS_MAX = 20_000
JOB_SCRIPT_CHARS_MAX = 20_000
# Deliveries of a job's results: how many are on record, how often one is tried, and the first wait, which grows fourfold.
DELIVERIES_KEPT = 20
DELIVERY_ATTEMPTS_MAX = 5
DELIVERY_WAIT_S = 30.0
DELIVERED_FILE_BYTES_MAX = 64 * 1024 * 1024
DELIVERY_ERROR_CHARS_MAX = 500
NOTIFY_S_MAX = 60.0
NOTIFICATION_CHARS_MAX = 1_000
JOBS_MAX = 500

# Subagents
DELEGATED_TASKS_MAX = 3
DELEGATED_CHARS_MAX = 100_000
GOAL_SHOWN_CHARS_MAX = 500

# MCP servers
MCP_NAME_CHARS_MAX = 64
MCP_SCHEMA_BYTES_MAX = 32 * 1024
MCP_DESCRIPTION_CHARS_MAX = 1_024
MCP_TOOLS_MAX = 1_000
MCP_PAGES_MAX = 100
MCP_MESSAGE_BYTES_MAX = 8 * 1024 * 1024
MCP_ANSWER_CHARS_MAX = 200_000
MCP_SCHEMA_DEPTH_MAX = 40
MCP_WINDOW_SHARE = 0.25
MCP_WAIT_S_MIN = 1.0
MCP_WAIT_S_MAX = 60.0
MCP_FAILURES_MAX = 5
MCP_STEADY_S = 60.0
MCP_READY_S_MAX = 10.0
MCP_RELIST_S = 1.0
MCP_END_S_MAX = 2.0
# A step of a turn that takes longer is reported again to the MCP client that waits for it.
MCP_PROGRESS_S = 10.0
# What a program says that nobody needs (its error output, lines that are no messages) is read at once up to so many lines,
# and then at this rate.
CHATTER_LINES_MAX = 25_000
CHATTER_LINES_PER_S = 4_000
CHATTER_LINE_BYTES = 4096

# Commands
COMMAND_CHARS_MAX = 100_000
COMMAND_OUTPUT_BYTES_KEPT = 10 * 1024 * 1024
COMMAND_SHOWN_CHARS_MAX = 200_000
COMMAND_PIECE_CHARS = 8 * 1024
COMMAND_QUIET_S = 0.2
BACKGROUND_MAX = 64
BACKGROUND_OUTPUT_CHARS_MAX = 200_000
PROCESS_WAIT_S = 60.0
PROCESS_WAIT_S_MAX = 600.0
PROCESS_SLICE_CHARS = 10_000
CODE_S_MAX = 300.0
CODE_CHARS_MAX = 100_000
CODE_OUTPUT_CHARS_MAX = 50_000
CODE_ERRORS_CHARS_MAX = 10_000
CODE_CALLS_MAX = 50
CODE_CALL_BYTES_MAX = 16 * 1024 * 1024
REVIEW_TOKENS_MAX = 1_000

# Files
READ_LINES = 500
READ_LINES_MAX = 2_000
LINE_CHARS_MAX = 2_000
LINE_BYTES_MAX = 64 * 1024
BLOCK_BYTES = 1024 * 1024
SEEN_BYTES_MAX = 64 * 1024 * 1024
READ_WINDOW_SHARE = 0.12
WRITTEN_BYTES_MAX = 10 * 1024 * 1024
NEAR_NAMES_MAX = 5
DIAGNOSED_BYTES_MAX = 64 * 1024
DIFF_CHARS_MAX = 20_000
# Of a file that is written anew, which the model has just spelt out.
WRITTEN_DIFF_CHARS_MAX = 4_000
COMPARED_LINES_MAX = 4_000
# Lines that are compared for hunks whose lines occur many times in a file.
REPEATED_LINES_MAX = 5_000_000
PLACES_TOLD_MAX = 100
SEARCH_FILES_S_MAX = 30.0
SEARCH_HITS = 50
SEARCH_HITS_MAX = 500
SEARCH_CONTEXT_LINES_MAX = 10
SEARCH_LINE_CHARS_MAX = 500
SEARCH_LISTED_BYTES_MAX = 32 * 1024 * 1024
SEARCH_PATTERN_CHARS_MAX = 2_000

# Sandboxes
CHUNK_BYTES_MAX = 64 * 1024
SHELL_STATE_BYTES_MAX = 128 * 1024
SANDBOX_PROCESSES_MAX = 512
SANDBOX_OPEN_FILES_MAX = 4096
SANDBOX_FILE_BYTES_MAX = 10 * 1024**3
SANDBOX_START_S_MAX = 10.0
# An idle sandbox is removed after this time, and the longest idle one when there are more.
SANDBOX_IDLE_S_MAX = 600.0
SANDBOXES_IDLE_MAX = 16
# What is looked at in a workspace: folders that are watched while commands run, and files that are mounted read-only.
WATCHED_FOLDERS_MAX = 50_000
WATCHED_DEPTH_MAX = 100
PROTECTED_PATHS_MAX = 10_000
CONTAINER_IDLE_S_MAX = 600.0
CONTAINER_CALL_S_MAX = 60.0
CONTAINER_PULL_S_MAX = 600.0
CONTAINER_VARIABLE_BYTES_MAX = 32 * 1024
# Disk use of a sandbox: how often free space is looked at, after how long or how much less of it the folders are
# measured, how long that may take, and what must stay free. The spill files of a home are trimmed in steps.
DISK_LOOK_S = 2.0
DISK_MEASURED_S = 300.0
DISK_STEP_BYTES = 64 * 1024**2
DISK_MEASURE_S_MAX = 30.0
DISK_FREE_BYTES_MIN = 256 * 1024**2
SPILL_BYTES_MAX = 500 * 1024**2
SPILL_TRIM_BYTES = 16 * 1024**2
SPILL_FOLDER_IDLE_S = 3600.0
# The proxy that is the only way out of a sandbox
EGRESS_HEAD_BYTES_MAX = 16 * 1024
EGRESS_HEAD_S_MAX = 10.0
EGRESS_IDLE_S_MAX = 300.0
EGRESS_CONNECTIONS_MAX = 64
EGRESS_LINGER_S_MAX = 1.0
EGRESS_REFUSALS_SHOWN_MAX = 5

# The web
WEB_RESULTS_MAX = 20
WEB_QUERY_CHARS_MAX = 400
WEB_SNIPPET_CHARS_MAX = 500
EXTRACTED_PAGES_MAX = 5
EXTRACTED_CHARS_MIN = 100
EXTRACTED_CHARS_MAX = 100_000
PAGE_SPILLED_BYTES_MAX = 2_000_000
PAGE_CHARS_MAX = 2_000_000
PAGE_READ_S_MAX = 10.0
PLAIN_HTML_CHARS_MAX = 1_000_000
MAIN_PART_CHARS_MIN = 200
NESTED_LISTS_SHOWN_MAX = 8

# Looking at images
IMAGE_BYTES_MAX = 20 * 1024 * 1024
IMAGE_PIXELS_WIDE_MAX = 2_048
IMAGE_PIXELS_MAX = 64_000_000
IMAGE_SENT_BYTES_MAX = 3_500_000
IMAGE_UNSCALED_BYTES_MAX = 1_000_000
IMAGE_ANSWER_TOKENS_MAX = 2_048
IMAGE_QUESTION_CHARS_MAX = 10_000
MCP_IMAGES_MAX = 8
IMAGE_S_MAX = 400.0

# The command line
SERVER_BACK_S_MAX = 60.0
SERVER_HEALTH_S_MAX = 2.0
SERVER_POLL_S = 0.25
BUSY_SHOWN_AFTER_S = 2.0
ATTACHED_BYTES_MAX = 5 * 1024 * 1024
CLIPBOARD_S_MAX = 5.0
TOOL_LINES_SHOWN = 5
# A longer line is shown without its Markdown.
DRAWN_LINE_CHARS_MAX = 4_000

# Editors (the Agent Client Protocol)
ACP_LINE_BYTES_MAX = 64 * 1024 * 1024
ACP_CLOSE_S_MAX = 2.0
ACP_FILE_S_MAX = 20.0
ACP_TERMINAL_BYTES_MAX = 1024 * 1024
ACP_OUTPUT_EVERY_S = 0.3
ACP_OUTPUT_CHARS_MAX = 20_000
ACP_TITLE_CHARS_MAX = 120
ACP_FILES_REMEMBERED_MAX = 64
ACP_SESSIONS_PER_PAGE = 50
ACP_SERVERS_MAX = 64

# Searching conversations
RECALLED = 3
RECALLED_MAX = 10
RECALL_WINDOW = 5
RECALL_WINDOW_MAX = 20
RECALLED_CHARS_MAX = 2_000
RECALL_BATCH = 50
RECALL_BATCHES_MAX = 10

# Skills
SKILL_NAME_CHARS_MAX = 64
SKILL_CHARS_MAX = 100_000
SKILL_ABOUT_CHARS_MAX = 1_024
SKILL_FILE_BYTES_MAX = 1024 * 1024
SKILL_FILES_LISTED_MAX = 200

# The local model
LOCAL_CONTEXT_TOKENS_MIN = 512
LOCAL_OUTPUT_TOKENS_MAX = 2_048
LOCAL_STATES_MAX = 4
LOCAL_START_S_MAX = 300.0
LOCAL_END_S_MAX = 5.0
SOCKET_PATH_BYTES_MAX = 100

# In a burst so many turns start at a time; one that has not asked its model after this long holds nobody up.
TURNS_STARTING_MAX = 64
TURNS_STARTING_S_MAX = 0.25

# While more turns than this are at work, what every turn looks at is looked at once for all that begin in a moment.
BUSY_TURNS = 8
SAME_MOMENT_S = 0.05
LATELY_MAX = 256
# Sets of tools that are remembered, each for the settings it was made with.
OFFERED_TOOLS_MAX = 64

# Browser sign-in: how long it is valid, how many an owner has at once, and how many wrong keys an address may send.
KEY_CHARS_MAX = 1_000
SIGN_IN_KEPT_S = 14 * 86_400.0
SIGN_INS_PER_OWNER_MAX = 100
WRONG_KEYS_PER_MINUTE_MAX = 10
WRONG_KEY_ADDRESSES_MAX = 1_000

# The part of a run's input that is shown with it
RUN_INPUT_SHOWN_CHARS = 500

# A model that is tried over the API
MODEL_TRIAL_S_MAX = 90.0

# Forks of one session that are listed together
BRANCHES_MAX = 200

# Usage by day: how long it is kept, and how often counts are written.
USAGE_KEPT_DAYS = 400
USAGE_WRITTEN_S = 5.0
USAGE_ROWS_MAX = 10_000
