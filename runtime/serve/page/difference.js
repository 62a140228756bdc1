// Where two answers first part.

/**
 * For each of two answers (text, tokens, isWhole) the place in its text from which on it differs from the other: the
 * beginning of the token in which the first different character is, or that character where tokens are not known.
 * null if they are the same as far as both go.
 */
export function parting(a, b) {
  const least = Math.min(a.text.length, b.text.length);
  let same = 0;
  while (same < least && a.text[same] === b.text[same]) same += 1;
  const isOver = (one) => same === one.text.length;
  if ((isOver(a) && isOver(b)) || (isOver(a) && !a.isWhole) || (isOver(b) && !b.isWhole)) return null;
  return [tokenStart(a, same), tokenStart(b, same)];
}

function tokenStart({ text, tokens }, place) {
  let start = 0;
  for (const token of tokens) {
    let end = start + token.length;
    if (!text.startsWith(token, start)) {
      // Some tokenizers leave out the space before a word when they decode it alone.
      if (text[start] !== " " || !text.startsWith(token, start + 1)) break;
      end += 1;
    }
    if (end > place) return start;
    start = end;
  }
  // A pair of UTF-16 units is one character.
  return /^[\udc00-\udfff]/.test(text.slice(place)) ? place - 1 : place;
}
