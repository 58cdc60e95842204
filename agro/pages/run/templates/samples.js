// Search, filter and compare the responses to held-out prompts. The page is readable without it.
(() => {
  const state = {text: '', kind: 'all', low: '', high: '', step: null, difference: true, at: -1};
  const WORDS = 500; // longest text that is compared; longer ones are shown without differences
  const find = (selector, inside = document) => inside.querySelector(selector);
  let data = null;

  const shown = index => data.responses[index][state.step];
  const words = text => text.split(/(\s+)/);
  const element = (name, text) => {
    const node = document.createElement(name);
    node.textContent = text;
    return node;
  };

  // Differences of two texts by words, or by characters if they have no word in common.
  const difference = (before, after) =>
    common(words(before), words(after)) ?? common([...before], [...after]) ?? [[null, after]];

  // Pieces of two lists by their longest common subsequence, [element name or null, text]; null if it is empty.
  const common = (a, b) => {
    if (a.length > WORDS || b.length > WORDS) return null;
    const longest = Array.from({length: a.length + 1}, () => new Uint16Array(b.length + 1));
    for (let i = a.length - 1; i >= 0; i--)
      for (let j = b.length - 1; j >= 0; j--)
        longest[i][j] = a[i] === b[j] ? longest[i + 1][j + 1] + 1
                                      : Math.max(longest[i + 1][j], longest[i][j + 1]);
    const pieces = [];
    const add = (name, word) => {
      const last = pieces.at(-1);
      if (last && last[0] === name) last[1] += word;
      else pieces.push([name, word]);
    };
    let [i, j] = [0, 0];
    while (i < a.length || j < b.length) {
      if (i < a.length && j < b.length && a[i] === b[j]) { add(null, b[j]); i++; j++; }
      else if (j < b.length && (i === a.length || longest[i][j + 1] > longest[i + 1][j])) add('ins', b[j++]);
      else add('del', a[i++]);
    }
    return pieces.some(([name, piece]) => !name && piece.trim()) ? pieces : null;
  };

  const KINDS = {
    all: () => true,
    changed: (start, now) => start && now && start[0].join('') !== now[0].join(''),
    better: (start, now) => start && now && now[1] > start[1],
    worse: (start, now) => start && now && now[1] < start[1],
  };

  const fits = (index, article) => {
    const now = shown(index);
    const reward = now ? now[1] : null;
    if (!KINDS[state.kind](data.responses[index][0], now)) return false;
    if ((state.low !== '' || state.high !== '') && reward === null) return false;
    if (state.low !== '' && reward < Number(state.low)) return false;
    if (state.high !== '' && reward > Number(state.high)) return false;
    const text = article.dataset.prompt + '\n' + (now ? now[0].join('') : '');
    return text.toLowerCase().includes(state.text.toLowerCase());
  };

  const fill = (index, article) => {
    const now = shown(index);
    const start = data.responses[index][0];
    const reward = now && now[1] !== null ? ` · reward ${Number(now[1].toPrecision(6))}` : '';
    find('.now .aside', article).textContent = `step ${data.steps[state.step]}${reward}`;
    const compared = state.difference && start && now && state.step > 0;
    const parts = now ? now[0] : ['none'];
    const turns = parts.map((part, i) => turn(part, i, compared ? start[0][i] ?? '' : part));
    find('.now .turns', article).replaceChildren(...turns.filter((_, i) => parts[i] || parts.length === 1));
  };

  // A turn of the policy with its difference to the start, or, at odd positions, a folded turn of the environment.
  const turn = (part, position, before) => {
    const text = element('pre', '');
    if (position % 2 === 0) {
      const pieces = part === before ? [[null, part]] : difference(before, part);
      text.replaceChildren(...pieces.map(([name, piece]) => name ? element(name, piece) : piece));
      return text;
    }
    text.textContent = part;
    const folded = element('details', '');
    folded.append(element('summary', 'environment'), text);
    return folded;
  };

  const apply = () => {
    if (!find('#evaluations')) return;
    data = JSON.parse(find('#evaluations').textContent);
    const last = data.steps.length - 1;
    if (state.step === null || state.step > last) state.step = last;
    const bar = find('.toolbar');
    bar.hidden = false;
    document.body.classList.add('scripted');
    find('[name=step]', bar).max = last;
    for (const control of bar.querySelectorAll('[name]')) {
      if (control.type === 'checkbox') control.checked = state[control.name];
      else control.value = state[control.name];
    }
    find('output', bar).textContent = `step ${data.steps[state.step]}`;
    const articles = [...document.querySelectorAll('article.sample')];
    let count = 0;
    articles.forEach((article, index) => {
      article.hidden = !fits(index, article);
      if (!article.hidden) { count++; fill(index, article); }
    });
    const filtered = state.text || state.kind !== 'all' || state.low !== '' || state.high !== '';
    if (filtered) open();
    find('.count', bar).textContent = `${count} of ${articles.length} prompts`;
  };

  const change = event => {
    const control = event.target;
    if (!control.name || !control.closest('.toolbar')) return;
    if (control.type === 'checkbox') state[control.name] = control.checked;
    else state[control.name] = control.name === 'step' ? Number(control.value) : control.value;
    apply();
  };

  const open = () => {
    const remaining = find('details.remaining');
    if (remaining) remaining.open = true;
  };

  const go = by => {
    open();
    const visible = [...document.querySelectorAll('article.sample:not([hidden])')];
    if (!visible.length) return;
    state.at = Math.min(Math.max(state.at + by, 0), visible.length - 1);
    visible[state.at].focus();
    visible[state.at].scrollIntoView({block: 'center'});
  };

  const evaluation = by => {
    state.step = Math.min(Math.max(state.step + by, 0), data.steps.length - 1);
    apply();
  };

  const KEYS = {
    j: () => go(1),
    k: () => go(-1),
    '[': () => evaluation(-1),
    ']': () => evaluation(1),
    d: () => { state.difference = !state.difference; apply(); },
    '/': () => find('.toolbar [name=text]').focus(),
  };

  document.addEventListener('input', change);
  document.addEventListener('keydown', event => {
    if (event.key === 'Escape') document.activeElement.blur();
    if (!data || event.target.closest?.('input, select') || event.ctrlKey || event.metaKey || event.altKey) return;
    const action = KEYS[event.key];
    if (action) { event.preventDefault(); action(); }
  });
  document.addEventListener('DOMContentLoaded', apply);
  document.addEventListener('replaced', apply); // by live.js
})();
