// Vectors of texts as a scatter of their first two principal components, with the nearest neighbours of each.

import { post } from "./api.js";
import { el, field, svg } from "./dom.js";
import { brief, count, counted, seconds } from "./format.js";
import { principal, similarities } from "./pca.js";

const MOST_TEXTS = 200;
const NEIGHBOURS = 3;
const [WIDEST, NARROWEST, MARGIN] = [640, 320, 36]; // pixels of the picture
const [LABEL, CHARACTER, LINE] = [28, 6.1, 11]; // characters of a label, and their size

const SAMPLE = `The cat sleeps on the sofa.
A kitten naps in the sun.
Dogs bark at the postman.
The stock market fell today.
Shares of banks lost value.
Inflation worries investors.
Boil the pasta for ten minutes.
Add garlic and olive oil.
Bake the bread until golden.
The telescope shows distant galaxies.
A comet passes near the sun.
Planets orbit their stars.`;

export class Vectors {
  constructor(root, model) {
    this.input = el("textarea", { rows: "16", spellcheck: "false" });
    this.input.value = SAMPLE;
    this.button = el("button", { class: "strong", type: "submit" }, "Show");
    this.results = el("div", { class: "results" });
    root.append(
      el("div", { class: "part-head" }, el("h2", {}, "Vectors of texts")),
      el("div", { class: "scroll vectors-layout" },
        el("form", { class: "vectors-form", onsubmit: (event) => { event.preventDefault(); this.run(); } },
          field("vectors-input", "Texts, one a line", this.input, `At most ${MOST_TEXTS}. Texts that mean similar things are close together.`),
          el("div", { class: "buttons" }, this.button)),
        this.results),
    );
    if (!model.tasks.includes("embedding")) {
      this.button.disabled = this.input.disabled = true;
      this.results.append(el("p", { class: "empty" }, `The file of ${model.id} defines no pooling. `,
        el("code", {}, "metal-prefill serve --pooling mean"), " takes the mean of the hidden states as the vector of a text."));
    }
  }

  async run() {
    const texts = this.input.value.split("\n").map((line) => line.trim()).filter(Boolean);
    if (texts.length < 3 || texts.length > MOST_TEXTS) {
      this.problem(`Enter 3 to ${MOST_TEXTS} texts; there are ${texts.length}.`);
      return;
    }
    this.button.disabled = true;
    try {
      const begin = performance.now();
      const answer = await post("v1/embeddings", { input: texts });
      const time = (performance.now() - begin) / 1000;
      const vectors = answer.data.map(({ embedding }) => embedding);
      this.results.replaceChildren(new Scatter(texts, vectors, this.results.clientWidth).node,
        el("p", { class: "hint" }, `${counted(vectors.length, "vector")} of ${count(vectors[0].length)} values, `
          + `${counted(answer.usage.prompt_tokens, "token")} in ${seconds(time)}.`));
    } catch (error) {
      this.problem(error.message);
    }
    this.button.disabled = false;
  }

  problem(message) {
    this.results.replaceChildren(el("p", { class: "problem", role: "alert" }, message));
  }
}

/** Places labels next to points where they overlap neither each other nor a point; null where there is no room. */
function placeLabels(places, texts, width) {
  const taken = places.map(([x, y]) => [x - 6, y - 6, x + 6, y + 6]);
  const overlaps = ([a, b, c, d]) => taken.some(([e, f, g, h]) => a < g && e < c && b < h && f < d);
  return texts.map((text, i) => {
    const [x, y] = places[i];
    const long = CHARACTER * text.length;
    const candidates = [
      { x: 10, y: 4, anchor: "start", left: 9 }, { x: -10, y: 4, anchor: "end", left: -9 - long },
      { x: 0, y: -11, anchor: "middle", left: -long / 2 }, { x: 0, y: 19, anchor: "middle", left: -long / 2 },
    ];
    for (const { left, ...label } of candidates) {
      const box = [x + left, y + label.y - LINE + 3, x + left + long, y + label.y + 3];
      if (box[0] < 20 || box[2] > width - 4 || overlaps(box)) continue;
      taken.push(box);
      return { ...label, text };
    }
    return null;
  });
}

/** The scatter and the list of the neighbours of the selected text. */
class Scatter {
  constructor(texts, vectors, room) {
    this.texts = texts;
    this.width = Math.min(Math.max(room, NARROWEST), WIDEST);
    this.height = 0.75 * this.width;
    this.similar = similarities(vectors);
    const { points, explained } = principal(vectors);
    this.places = this.scaled(points);
    this.labels = placeLabels(this.places, texts.map((text) => brief(text, LABEL)), this.width);
    this.lines = svg("g", { class: "links" });
    this.dots = texts.map((text, i) => this.dot(text, i));
    this.list = el("div", { class: "neighbours", "aria-live": "polite" });
    const percent = (part) => `${Math.round(100 * part)}% of the variance`;
    const picture = svg("svg", { class: "scatter", viewBox: `0 0 ${this.width} ${this.height}`, role: "group", "aria-label": "Texts by their first two principal components" },
      svg("rect", { class: "frame", x: 0.5, y: 0.5, width: this.width - 1, height: this.height - 1, rx: 8 }),
      svg("text", { class: "axis", x: this.width - 12, y: this.height - 10, "text-anchor": "end" }, `component 1: ${percent(explained[0])}`),
      svg("text", { class: "axis", x: -12, y: 20, transform: "rotate(-90)", "text-anchor": "end" }, `component 2: ${percent(explained[1])}`),
      this.lines, this.dots);
    this.node = el("div", { class: "scatter-and-list" }, picture, this.list);
    this.select(0);
  }

  scaled(points) {
    const range = (axis) => {
      const values = points.map((point) => point[axis]);
      const [low, high] = [Math.min(...values), Math.max(...values)];
      return high - low > 1e-9 ? [low, high - low] : [low - 0.5, 1];
    };
    const [[x0, w], [y0, h]] = [range(0), range(1)];
    return points.map(([x, y]) => [
      MARGIN + ((x - x0) / w) * (this.width - 2 * MARGIN),
      this.height - MARGIN - ((y - y0) / h) * (this.height - 2 * MARGIN),
    ]);
  }

  dot(text, i) {
    const [x, y] = this.places[i];
    const label = this.labels[i];
    return svg("g", {
      class: "dot", transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, role: "button", tabindex: i === 0 ? 0 : -1,
      "aria-label": text,
      onclick: () => this.select(i, true), onpointerenter: () => this.select(i), onfocus: () => this.select(i),
      onkeydown: (event) => this.key(event, i),
    },
    svg("circle", { class: "halo", r: 12 }), svg("circle", { class: "point", r: 5 }),
    label && svg("text", { x: label.x, y: label.y, "text-anchor": label.anchor }, label.text));
  }

  key(event, i) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = (i + step + this.texts.length) % this.texts.length;
    this.dots[next].focus();
  }

  select(i, focus = false) {
    const near = this.similar[i].map((value, j) => [value, j]).filter(([, j]) => j !== i).sort((a, b) => b[0] - a[0]).slice(0, NEIGHBOURS);
    const [x, y] = this.places[i];
    this.lines.replaceChildren(...near.map(([, j]) => svg("line", { x1: x, y1: y, x2: this.places[j][0], y2: this.places[j][1] })));
    this.dots.forEach((dot, j) => {
      dot.classList.toggle("chosen", j === i);
      dot.classList.toggle("near", near.some(([, k]) => k === j));
      dot.setAttribute("tabindex", j === i ? "0" : "-1");
    });
    if (focus) this.dots[i].focus();
    this.list.replaceChildren(
      el("h3", {}, "Nearest to"), el("p", { class: "chosen-text" }, this.texts[i]),
      el("ol", {}, near.map(([value, j]) => el("li", {}, el("span", { class: "similarity" }, value.toFixed(3)), " ", this.texts[j]))),
      el("p", { class: "hint" }, "Cosine similarity. Arrow keys move between the texts."));
  }
}
