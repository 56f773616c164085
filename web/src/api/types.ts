/** The objects of the HTTP API, as far as the page reads them. */

export interface Session {
  id: string;
  title: string | null;
  preview: string | null;
  source: string | null;
  model: string | null;
  started_at: number;
  last_active: number | null;
  message_count: number;
  tool_call_count: number;
  input_tokens: number;
  output_tokens: number;
  cache_read_tokens: number;
  reasoning_tokens: number;
  actual_cost_usd: number | null;
  api_call_count: number;
  parent_session_id: string | null;
  forked_at_message_id: number | null;
  archived: boolean;
  pinned: boolean;
  workdir: string | null;
  toolsets: string[] | null;
  reasoning_effort?: string | null;
  active_run_id: string | null;
  owner?: string;
}

export interface ContentPart {
  type: string;
  text?: string;
  image_url?: { url: string } | string;
  file?: { filename?: string; file_data?: string };
}

export interface StoredCall {
  id: string;
  function: { name: string; arguments: string };
}

export interface StoredMessage {
  id: number;
  session_id: string;
  role: "user" | "assistant" | "tool" | "system";
  content: string | ContentPart[] | null;
  tool_call_id: string | null;
  tool_calls: StoredCall[] | null;
  tool_name: string | null;
  timestamp: number;
  finish_reason: string | null;
  synthetic: boolean;
  run_id: string | null;
  reasoning?: string | null;
  reasoning_content?: string | null;
}

export interface List<T> {
  data: T[];
  has_more: boolean;
  next_cursor?: string | null;
  total?: number;
}

export interface Match {
  session_id: string;
  title: string | null;
  message_id: number | null;
  role: string | null;
  timestamp: number | null;
  snippet: string;
  highlights: [number, number][];
}

export interface Usage {
  input_tokens: number;
  output_tokens: number;
  total_tokens: number;
  input_tokens_details?: { cached_tokens: number };
  output_tokens_details?: { reasoning_tokens: number };
}

export type RunStatus =
  | "queued"
  | "running"
  | "waiting_for_approval"
  | "waiting_for_input"
  | "stopping"
  | "completed"
  | "failed"
  | "cancelled";

export interface Run {
  run_id: string;
  kind: string;
  status: RunStatus;
  created_at: number;
  started_at: number | null;
  updated_at: number;
  finished_at: number | null;
  session_id: string;
  model: string | null;
  last_event: string | null;
  last_seq: number;
  output: string | null;
  error: string | null;
  error_code: string | null;
  usage: Usage;
  input: string | null;
  owner?: string;
}

export interface RunStarted {
  run_id: string;
  session_id: string;
  created_at: number;
}

/** One event of a run's log; which of the other fields there are depends on `event`. */
export interface RunEvent {
  event: string;
  run_id: string;
  seq: number;
  timestamp: number;
  [field: string]: unknown;
}

export interface Model {
  id: string;
  root: string;
  parent: string | null;
}

export interface Toolset {
  name: string;
  label: string;
  description: string;
  enabled: boolean;
  available: boolean;
  tools: string[];
}

export interface Capabilities {
  model: string;
  version: string;
  auth: { required: boolean; owner: string; scopes: string[] };
  runtime: { sandbox: { backend: string; isolated: boolean } };
  features: Record<string, boolean | string>;
  limits: Record<string, number>;
  endpoints: Record<string, { method: string; path: string }>;
}

export interface StoredFile {
  id: string;
  name: string;
  bytes: number;
  mime: string;
  direction: string;
}

export interface Job {
  id: string;
  name: string;
  prompt: string;
  schedule_display: string;
  schedule?: { expr?: string; display?: string };
  timezone: string | null;
  enabled: boolean;
  state: string;
  next_run_at: number | string | null;
  last_run_at: number | string | null;
  last_status: string | null;
  last_error: string | null;
  last_run_id: string | null;
  session_id: string | null;
  last_session_id: string | null;
  deliveries: { status: string; error: string | null }[];
}

export interface Check {
  status: string;
  [field: string]: unknown;
}

export interface DetailedHealth {
  status: string;
  version: string;
  uptime_seconds: number;
  active_agents: number;
  gateway_state: string | null;
  readiness: { status: string; checks: Record<string, Check> };
}
