// Applies the chosen colours before the page is drawn: "light", "dark", or those of the system.
"use strict";
try {
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is disabled: the colours are those of the system.
}
