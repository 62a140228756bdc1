// Server-sent events of a response's body.

/** The data of each event, as text. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const found = (rest + value).split(/\r?\n\r?\n/);
      rest = found.pop();
      for (const event of found) {
        const data = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (data.length > 0) yield data.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
