// Calls of the server's API, with the key if there is one.

const KEY = "smelt-api-key";

/** What the API refuses; its message is the API's own sentence. */
export class ApiProblem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** `call(path)` gets, `call(path, body)` posts. A "key-needed" event of the document says that the key is missing or wrong. */
export async function call(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  const options = { headers, signal };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiProblem("The server cannot be reached; see whether it still runs.", 0);
  }
  if (response.ok) return response;
  const problem = new ApiProblem(await sentence(response), response.status);
  if (response.status === 401) document.dispatchEvent(new CustomEvent("key-needed", { detail: problem.message }));
  throw problem;
}

async function sentence(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    // Something between here and the server has answered.
    return `The answer to ${new URL(response.url).pathname} was HTTP status ${response.status}.`;
  }
}
