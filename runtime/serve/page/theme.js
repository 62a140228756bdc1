// Light or dark: as the system says, until the button is used.

const STORED = "smelt-theme";
const root = document.documentElement;
const system = window.matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  return root.dataset.theme === undefined ? system.matches : root.dataset.theme === "dark";
}

function choose(theme) {
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;
}

choose(localStorage.getItem(STORED));

export function themeButton(button) {
  const show = () => button.setAttribute("aria-pressed", String(isDark()));
  button.addEventListener("click", () => {
    choose(isDark() ? "light" : "dark");
    localStorage.setItem(STORED, root.dataset.theme);
    show();
  });
  system.addEventListener("change", show);
  show();
}
