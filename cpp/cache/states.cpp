#include "states.h"

#include <algorithm>
#include <iterator>
#include <new>

#include "../base/errors.h"
#include "../base/rounding.h"

namespace metal_prefill {

StateLayout::StateLayout(const Config& config) {
  for (int layer = 0; layer < config.n_layers; ++layer) {
    first.push_back(values);
    values += round_up(config.state_values(layer), std::size_t(16));  // to a cache line
  }
}

StatePool::StatePool(PageStore& store, std::size_t limit, std::size_t page_bytes, MemoryBudget* budget)
    : slots_(store, limit, budget),
      interval_(int(page_bytes > PageStore::kLeastPage
                        ? std::min(ceil_div(store.page_bytes(), page_bytes), kMostPages)
                        : kPagesWithoutAttention) *
                kPagePositions) {}

bool StatePool::drop_snapshot() {
  const std::scoped_lock lock(mutex_);
  if (snapshots_.empty()) return false;
  const Snapshot& oldest = snapshots_.front();
  oldest.owner->drop(oldest.owner->snapshots_.find(oldest.position));
  return true;
}

SequenceStates::~SequenceStates() {
  const std::scoped_lock lock(pool_.mutex_);
  drop_after(-1);
}

// Requires that the pool's mutex is locked.
void SequenceStates::drop(std::map<int, StatePool::Snapshots::iterator>::iterator snapshot) {
  pool_.snapshots_.erase(snapshot->second);
  snapshots_.erase(snapshot);
}

void SequenceStates::drop_after(int position) {
  while (!snapshots_.empty() && std::prev(snapshots_.end())->first > position)
    drop(std::prev(snapshots_.end()));
}

int SequenceStates::nearest(int position) const {
  if (current_.position <= position) return current_.position;
  const std::scoped_lock lock(pool_.mutex_);
  const auto after = snapshots_.upper_bound(position);
  return after == snapshots_.begin() ? 0 : std::prev(after)->first;
}

void SequenceStates::rewind(int position) {
  const std::scoped_lock lock(pool_.mutex_);
  drop_after(position);
  if (current_.position <= position) return;
  if (snapshots_.empty()) {
    current_ = {};
    return;
  }
  const auto& [at, snapshot] = *std::prev(snapshots_.end());
  current_ = {at, snapshot->state};
  pool_.snapshots_.splice(pool_.snapshots_.end(), pool_.snapshots_, snapshot);
}

void SequenceStates::replace(int position, StatePoint point) {
  const std::scoped_lock lock(pool_.mutex_);
  drop_after(position);
  current_ = std::move(point);
}

void SequenceStates::share(const SequenceStates& from, int position) {
  const std::vector<StatePoint> points = from.points(position);
  {
    const std::scoped_lock lock(pool_.mutex_);
    drop_after(-1);
  }
  for (const StatePoint& point : points) keep(point);
  current_ = points.empty() ? StatePoint{} : points.back();
}

std::vector<StatePoint> SequenceStates::points(int position) const {
  const std::scoped_lock lock(pool_.mutex_);
  std::vector<StatePoint> points;
  points.reserve(snapshots_.size() + 1);
  for (const auto& [at, snapshot] : snapshots_)
    if (at <= position) points.push_back({at, snapshot->state});
  if (current_.position > 0 && current_.position <= position) {
    std::erase_if(points, [&](const StatePoint& point) { return point.position >= current_.position; });
    points.push_back(current_);
  }
  return points;
}

ChunkStates SequenceStates::plan(const Wanted& wanted) const {
  ChunkStates planned{current_.state, {}, {}};
  const int end = current_.position + wanted.tokens;
  std::map<int, bool> positions;  // whether the state at a position is kept
  const int interval = pool_.interval();
  for (int after = end / interval * interval; after > current_.position; after -= interval)
    positions[after] = true;
  for (const int mark : wanted.marks)
    if (mark > current_.position && mark <= end) positions[mark] = true;
  if (pool_.writes_each_draft())
    for (int tokens = std::max(wanted.first_draft, 1); tokens < wanted.tokens; ++tokens)
      positions.try_emplace(current_.position + tokens, false);
  positions[end] |= wanted.keep_last;
  planned.writes.reserve(positions.size());
  StateRef last = pool_.take();  // taken first: the other states only save recomputation
  for (const auto& [at, keep] : positions) {
    if (at == end) break;
    try {
      planned.writes.push_back({at - current_.position, pool_.take(), keep});
    } catch (const KvMemoryError&) {
    }
  }
  planned.writes.push_back({wanted.tokens, std::move(last), positions[end]});
  return planned;
}

void SequenceStates::advance(const ChunkStates& states, int tokens) noexcept {
  const int position = current_.position;
  for (const StateWrite& write : states.writes) {
    if (write.tokens > tokens) break;
    const StatePoint point{position + write.tokens, write.state};
    if (write.keep) keep(point);
    current_ = point;
  }
}

// Drops the state if there is no memory for its entry.
void SequenceStates::keep(const StatePoint& point) noexcept try {
  StatePool::Snapshots made;
  made.push_back({this, point.position, point.state});
  const std::scoped_lock lock(pool_.mutex_);
  const auto [place, added] = snapshots_.try_emplace(point.position, made.begin());
  if (!added) return;
  pool_.snapshots_.splice(pool_.snapshots_.end(), made);
  const auto is_end = [&](const auto& snapshot) { return snapshot.first % pool_.interval() != 0; };
  if (is_end(*place) && std::size_t(std::count_if(snapshots_.begin(), snapshots_.end(), is_end)) > kMostEnds)
    drop(std::find_if(snapshots_.begin(), snapshots_.end(), is_end));
} catch (const std::bad_alloc&) {
}

std::size_t SequenceStates::bytes() const {
  const std::scoped_lock lock(pool_.mutex_);
  const bool is_snapshot = current_.position == 0 || snapshots_.contains(current_.position);
  return (snapshots_.size() + !is_snapshot) * pool_.slot_bytes();
}

}  // namespace metal_prefill
