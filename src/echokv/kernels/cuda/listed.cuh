// Fetching what `index_scores` lists; for fetch_listed.cu. What passes between the two is in
// prefetch.cuh.
//
//   lists --scanners--> sketch of each row's scores --judges--> bars
//                   \-> queue in shared memory --posters: budget, claim, victim--> mailboxes
//   mailboxes --movers: host to device-->
#pragma once
#include "prefetch.cuh"

#ifndef LISTED_THREADS
#define LISTED_THREADS 1024
#endif
#ifndef FINDING_WARPS  // of a block that is a group of its own
#define FINDING_WARPS (LISTED_THREADS / WARP / 2)
#endif
#ifndef QUEUE_ENTRIES
#define QUEUE_ENTRIES 4096
#endif
constexpr u32 LISTED_WARPS = LISTED_THREADS / WARP;
constexpr u32 MOST_LISTS = 4;   // of a warp that scans

// Candidates in the order in which they come, in device memory; what comes after the last place is
// forgotten.
struct Queue {
  Listed* entries;  // [QUEUE_ENTRIES]
  u32 *tail, *head;
};

struct FetchShared {
  u32 scanning, posting;   // warps that still are
  u32 tails[2], heads[2];  // of the queues
  u32 pad[2];
  u32 lows[MOST_ROWS];     // keys of the scores from which on candidates are listed
  u32 budgets[MOST_ROWS];  // of each row
};

struct ListedArguments {
  PrefetchArguments prefetch;
  Contexts contexts;
  const Listed* lists;  // [num_lists, LIST]
  Listed* queues;       // [groups, 2, QUEUE_ENTRIES]
  const u32* epoch;     // [1]
  const i32* kth;       // [rows], bits of the true k-th scores; UNKNOWN until they are known
  const i32* scored;    // [rows], pages whose candidates are listed
  u32* sketch;          // [rows, SKETCH_BINS], candidates by score
  Boxes* boxes;         // [groups]
  i32* bars;            // [rows], bits of the scores that are worth fetching; predictions at first
  u32 num_lists;
  u32 k;
  float margin;         // see lowered()
  u32 group;            // blocks of one
};

// Who finds and who moves in a group: its first block and the others, or parts of the only one.
struct Roles {
  u32 scanning, judging, posting, finding;  // warps, in this order; the last is their sum
  u32 moving;  // warps of a block that moves
  u32 words;   // of `idle` in use
  bool alone;  // a group of one block
};

DEVICE Roles roles_of(u32 blocks) {
  Roles roles = {};
  roles.alone = blocks == 1;
  roles.finding = roles.alone ? FINDING_WARPS : LISTED_WARPS;
  roles.scanning = roles.finding / 2;
  roles.judging = roles.finding < 16 ? 1 : roles.finding / 8;
  roles.posting = roles.finding - roles.scanning - roles.judging;
  roles.moving = roles.alone ? LISTED_WARPS - FINDING_WARPS : LISTED_WARPS;
  roles.words = roles.alone ? BOXES : (blocks - 1) * BOXES;
  return roles;
}

DEVICE Queue queue_of(const ListedArguments& a, FetchShared* shared, u32 group, u32 which) {
  return {a.queues + u64(group * 2 + which) * QUEUE_ENTRIES, &shared->tails[which],
          &shared->heads[which]};
}

// A box that this lane may post to.
struct Box {
  u32 word, bit;
  bool taken;
};

// Boxes for the first of the wanting lanes, as many as are idle.
DEVICE Box take_boxes(Boxes* boxes, const Roles& roles, u32 wanting, u32 lane) {
  const u32 wanted = __popc(wanting);
  u32 mine = lane < roles.words ? swap_relaxed(&boxes->idle[lane], 0) : 0;
  u32 total;
  const u32 before = lanes_before(__popc(mine), lane, &total);
  u32 surplus = mine;
  for (u32 i = before; i < wanted && surplus != 0; i++) surplus &= surplus - 1;
  if (surplus != 0) atomicOr(&boxes->idle[lane], surplus);
  mine &= ~surplus;
  u32 place = __popc(wanting & ((1u << lane) - 1));  // among the boxes
  Box box = {0, 0, false};
  const bool wants = wanting >> lane & 1;
  for (u32 word = 0; word < roles.words; word++) {
    u32 bits = __shfl_sync(ALL_LANES, mine, word);
    const u32 count = __popc(bits);
    if (wants && !box.taken && place < count) {
      for (u32 i = 0; i < place; i++) bits &= bits - 1;
      box = {word, u32(__ffs(bits)) - 1, true};
    }
    place -= smaller(place, count);
  }
  return box;
}

// Whether a candidate is worth fetching, as far as is known by now: not once the selection is.
DEVICE bool is_likely(const ListedArguments& a, u32 row, float score) {
  const i32 bar = load_shared_value(a.bars + row), kth = load_shared_value(a.kth + row);
  return score >= bits_float(u32(bar)) && u32(kth) == UNKNOWN;
}

// Whether any row's selection isn't known yet.
DEVICE bool any_open(const ListedArguments& a, u32 lane) {
  bool open = false;
  for (u32 row = lane; row < smaller(a.contexts.rows, MOST_ROWS); row += WARP)
    open = open || u32(load_shared_value(a.kth + row)) == UNKNOWN;
  return __any_sync(ALL_LANES, open);
}

DEVICE void push(const Queue& queue, bool wants, const Candidate& candidate, u32 epoch, u32 lane) {
  const u32 wanting = __ballot_sync(ALL_LANES, wants);
  if (wanting == 0) return;
  u32 first = 0;
  if (lane == 0) first = atomicAdd(queue.tail, u32(__popc(wanting)));
  first = __shfl_sync(ALL_LANES, first, 0);
  const u32 at = first + __popc(wanting & ((1u << lane) - 1));
  if (wants && at < QUEUE_ENTRIES)
    store_whole(queue.entries + at, {u32(candidate.host_slot), float_bits(candidate.score),
                                     candidate.row, epoch});
}

// The next few candidates, one a lane; `none` where there are none.
DEVICE Candidate pop(const Queue& queue, u32 epoch, bool* none, u32 lane) {
  u32 first = 0, count = 0;
  if (lane == 0) {
    for (u32 head = atomicAdd(queue.head, 0u);;) {
      const u32 tail = smaller(atomicAdd(queue.tail, 0u), QUEUE_ENTRIES);
      first = head;
      count = smaller(tail - head, WARP);
      if (count == 0) break;
      const u32 now =
          u32(atomicCAS(reinterpret_cast<i32*>(queue.head), i32(head), i32(head + count)));
      if (now == head) break;
      head = now;
    }
  }
  first = __shfl_sync(ALL_LANES, first, 0);
  count = __shfl_sync(ALL_LANES, count, 0);
  *none = count == 0;
  if (lane >= count) return {false, NONE, 0, 0};
  Words entry;
  do {
    entry = load_whole(queue.entries + first + lane);
  } while (entry.w != epoch);
  return {true, i32(entry.x), bits_float(entry.y), entry.z};
}

// Fetch the lanes' candidates, as movers become idle, as far as budgets go and while they are likely.
DEVICE void post(const ListedArguments& a, const FetchShared* shared, Boxes* boxes,
                 const Roles& roles, const Candidate& candidate, i32 floor, Fetched* fetched, u32 lane) {
  const PrefetchArguments& to = a.prefetch;
  const Layer& layer = to.layer;
  const u32 row = candidate.row;
  const bool waits = candidate.valid && is_likely(a, row, candidate.score);
  for (u32 left = __ballot_sync(ALL_LANES, waits); left != 0;) {
    const Box box = take_boxes(boxes, roles, left, lane);
    const u32 asking = __ballot_sync(ALL_LANES, box.taken);
    left &= ~asking;
    if (asking != 0) {
      u32 place = 0;
      bool granted = false;
      if (box.taken) {
        place = u32(atomicAdd(to.counts + row, 1));
        granted = place < shared->budgets[row];
        if (!granted) atomicAdd(to.counts + row, -1);
      }
      const bool mine = granted && claim(layer, candidate.host_slot);
      Mail* mail = &boxes->mail[box.word][box.bit];
      if (mine) store_shared_value(&mail->host_slot, candidate.host_slot);
      if (box.taken && !mine) atomicOr(&boxes->idle[box.word], 1u << box.bit);
      const u32 claims = __ballot_sync(ALL_LANES, mine);
      u32 first = 0;
      if (lane == 0 && claims != 0) first = take_names(layer, __popc(claims));
      first = __shfl_sync(ALL_LANES, first, 0);
      Victim victim = {0, NONE, NONE};
      bool settled = false;
      if (mine) {
        victim = name_victim(layer, first + __popc(claims & ((1u << lane) - 1)));
        settled = settle(layer, &victim, candidate.host_slot, floor, floor);
        store_shared_value(&mail->device_slot, victim.slot);
        if (settled) to.host_slots[row * to.most + place] = candidate.host_slot;
      }
      if (granted) to.scores[row * to.most + place] = candidate.score;
      fetched->evicted += __popc(__ballot_sync(ALL_LANES, settled && victim.owner >= 0));
      fetched->rows += __popc(__ballot_sync(ALL_LANES, settled));
    } else {
      pause_briefly();
    }
    const bool still = left >> lane & 1;
    left = __ballot_sync(ALL_LANES, still && is_likely(a, row, candidate.score));
  }
}

// One more candidate of a row.
DEVICE void note_score(const ListedArguments& a, FetchShared* shared, u32 row, float score) {
  const u32 bin = (order_key(float_bits(score)) - shared->lows[row]) >> SKETCH_SHIFT;
  atomicAdd(a.sketch + row * SKETCH_BINS + smaller(bin, SKETCH_BINS - 1), 1u);
}

// A warp that scans: it reads some lists in turn, as far as they are written.
DEVICE void scan(const ListedArguments& a, FetchShared* shared, u32 group, u32 first, u32 step,
                 u32 lane) {
  const u32 epoch = *a.epoch, lists = smaller(ceil_div(a.num_lists, step), MOST_LISTS);
  const Queue likely = queue_of(a, shared, group, 0), unlikely = queue_of(a, shared, group, 1);
  u32 places[MOST_LISTS] = {};
  u32 over = 0;
  for (u32 i = 0; i < MOST_LISTS; i++)
    if (i >= lists || first + i * step >= a.num_lists) over |= 1u << i;
  u64 since = nanoseconds();
  for (bool late = false; over != (1u << MOST_LISTS) - 1 && !late;) {
    bool any = false;
#pragma unroll
    for (u32 i = 0; i < MOST_LISTS; i++) {
      if (over >> i & 1) continue;
      const u32 at = places[i] + lane;
      Words entry = {0, 0, 0, epoch + 1};
      if (at < LIST) entry = load_whole(a.lists + u64(first + i * step) * LIST + at);
      // Entries may be seen in another order than they are in: as far as there is no gap.
      const u32 seen = __ballot_sync(ALL_LANES, entry.w == epoch);
      const u32 count = seen == ALL_LANES ? WARP : u32(__ffs(~seen)) - 1;
      if (count == 0) continue;
      any = true;
      const bool end = lane < count && i32(entry.x) == END;
      const bool found = lane < count && !end;
      places[i] += count;
      if (__any_sync(ALL_LANES, end) || places[i] >= LIST) over |= 1u << i;
      const Candidate one = {found, i32(entry.x), bits_float(entry.y), found ? entry.z : 0};
      bool absent = false, good = false;
      if (found) {
        absent = load_shared_value(a.prefetch.layer.host_to_device + one.host_slot) < 0;
        good = is_likely(a, one.row, one.score);
        note_score(a, shared, one.row, one.score);
      }
      push(likely, absent && good, one, epoch, lane);
      push(unlikely, absent && !good, one, epoch, lane);
    }
    if (any) since = nanoseconds();
    late = __all_sync(ALL_LANES, nanoseconds() - since > PATIENCE) || !any_open(a, lane);
    if (!any) pause_briefly();
  }
  warp_sync();
  if (lane == 0) finish(&shared->scanning);
}

// The score that a row's k-th will have if the rest of the row is like what is scored of it.
DEVICE void judge_row(const ListedArguments& a, FetchShared* shared, u32 row, u32 lane) {
  constexpr u32 EACH = SKETCH_BINS / WARP;
  const u32 pages = ceil_div(tokens_of(a.contexts, row), PAGE_TOKENS);
  const u32 scored =
      __shfl_sync(ALL_LANES, lane == 0 ? u32(load_shared_value(a.scored + row)) : 0u, 0);
  const u32 wanted = pages == 0 ? 0 : u32(u64(a.k) * scored / pages);
  if (wanted < LEAST_JUDGED && scored < pages) return;
  const u32 first = (WARP - 1 - lane) * EACH;  // the highest to lane 0
  u32 bins[EACH], sum = 0, total;
#pragma unroll
  for (u32 i = 0; i < EACH; i += 4) {
    const Words four = load_others_words(a.sketch + row * SKETCH_BINS + first + i);
    bins[i] = four.x, bins[i + 1] = four.y, bins[i + 2] = four.z, bins[i + 3] = four.w;
    sum += four.x + four.y + four.z + four.w;
  }
  u32 above = lanes_before(sum, lane, &total);
  u32 offset = 0;
  bool here = false;
#pragma unroll
  for (u32 i = EACH; i-- > 0;) {
    if (above < wanted && wanted <= above + bins[i]) {
      here = true;
      const float within = float(above + bins[i] - wanted) / float(bins[i]);
      offset = ((first + i) << SKETCH_SHIFT) + u32(within * float(1u << SKETCH_SHIFT));
    }
    above += bins[i];
  }
  const u32 holder = __ballot_sync(ALL_LANES, here);
  offset = holder == 0 ? 0 : __shfl_sync(ALL_LANES, offset, __ffs(holder) - 1);
  if (lane == 0)
    store_shared_value(a.bars + row, i32(order_bits(shared->lows[row] + offset)));
}

// How many warps of the block still do something, for whoever waits for them.
DEVICE u32 how_many(u32* counter, u32 lane) {
  return __shfl_sync(ALL_LANES, lane == 0 ? atomicAdd(counter, 0u) : 0u, 0);
}

DEVICE void judge(const ListedArguments& a, FetchShared* shared, u32 first, u32 step, u32 lane) {
  const u32 rows = smaller(a.contexts.rows, MOST_ROWS);
  while (how_many(&shared->posting, lane) != 0) {
    for (u32 row = first; row < rows; row += step) judge_row(a, shared, row, lane);
    pause_briefly();
  }
}

DEVICE void post_all(const ListedArguments& a, FetchShared* shared, Boxes* boxes,
                     const Roles& roles, u32 group, u32 lane) {
  const i32 floor = *a.prefetch.layer.floor;
  const u32 epoch = *a.epoch;
  const Queue likely = queue_of(a, shared, group, 0), unlikely = queue_of(a, shared, group, 1);
  Fetched fetched = {0, 0};
  for (;;) {
    const bool last = how_many(&shared->scanning, lane) == 0;
    if (!any_open(a, lane)) break;
    bool none;
    Candidate candidate = pop(likely, epoch, &none, lane);
    if (none && !last) {
      pause_briefly();
      continue;
    }
    if (none) candidate = pop(unlikely, epoch, &none, lane);
    if (none) break;
    post(a, shared, boxes, roles, candidate, floor, &fetched, lane);
  }
  add_fetched(a.prefetch, fetched, lane);
  warp_sync();
  if (lane == 0 && finish(&shared->posting) == 1) {
    device_fence();
    store_shared_value(reinterpret_cast<i32*>(&boxes->closed), 1);
  }
}

// What a field says, which then says nothing any more.
DEVICE i32 take_mail(i32* field, i32 nothing, u32 lane) {
  const i32 value =
      lane == 0 ? i32(swap_relaxed(reinterpret_cast<u32*>(field), u32(nothing))) : 0;
  return __shfl_sync(ALL_LANES, value, 0);
}

// Move the row that a box asks for; whether it does.
DEVICE bool move_one(const Layer& layer, Boxes* boxes, u32 word, u32 warp, u32 lane) {
  const u32 row_bytes = layer.row_bytes;
  Mail* mail = &boxes->mail[word][warp];
  const i32 host_slot = take_mail(&mail->host_slot, NONE, lane);
  if (host_slot < 0) return false;
  const u8* from = host_row(layer, host_slot);
  const RowPart part = load_part(from, row_bytes, lane);
  i32 slot;
  do {
    slot = take_mail(&mail->device_slot, UNSETTLED, lane);
  } while (slot == UNSETTLED);
  if (slot >= 0) {
    u8* to = device_row(layer, slot);
    store_part(to, part, row_bytes, lane);
    for (u32 at = PART_BYTES; at < row_bytes; at += PART_BYTES)
      store_part(to + at, load_part(from + at, row_bytes - at, lane), row_bytes - at, lane);
  }
  // The row has come: what is stored has been in registers.
  if (lane == 0) atomicOr(&boxes->idle[word], 1u << warp);
  return true;
}

// A warp that moves: a row of each box in turn.
DEVICE void move_mail(const Layer& layer, Boxes* boxes, u32 first_word, u32 warp, u32 lane) {
  for (;;) {
    const i32 closed =
        lane == 0 ? load_shared_value(reinterpret_cast<i32*>(&boxes->closed)) : 0;
    const bool last = __shfl_sync(ALL_LANES, closed, 0) != 0;
    if (last) device_fence();
    bool any = false;
    for (u32 number = 0; number < BOXES; number++)
      any = move_one(layer, boxes, first_word + number, warp, lane) || any;
    if (last && !any) break;
  }
}

// Before anybody finds anything.
DEVICE void begin_finding(const ListedArguments& a, FetchShared* shared, u32 thread) {
  for (u32 row = thread; row < smaller(a.contexts.rows, MOST_ROWS); row += LISTED_THREADS) {
    const float threshold = threshold_of(a.prefetch.request_slots, a.prefetch.thresholds, row);
    shared->lows[row] = order_key(float_bits(lowered(threshold, a.margin)));
    const bool takes_part = a.prefetch.request_slots[row] >= 0;
    shared->budgets[row] = takes_part ? budget_of(a.prefetch, a.contexts, row) : 0;
  }
}

// A thread of a group's block.
DEVICE void fetch_list(const ListedArguments& a, u32 index, u32 blocks, u32 thread) {
  const Roles roles = roles_of(a.group);
  const u32 lane = thread % WARP, warp = thread / WARP, groups = blocks / a.group;
  const u32 group = index / a.group, block = index % a.group;
  Boxes* boxes = a.boxes + group;
  if (block != 0) {
    move_mail(a.prefetch.layer, boxes, (block - 1) * BOXES, warp, lane);
    return;
  }
  FetchShared* shared = reinterpret_cast<FetchShared*>(shared_memory());
  if (thread < 2) shared->tails[thread] = shared->heads[thread] = 0;
  if (thread == 0) {
    shared->scanning = roles.scanning;
    shared->posting = roles.posting;
  }
  begin_finding(a, shared, thread);
  block_sync();
  const u32 judges = roles.scanning + roles.judging;
  if (warp >= roles.finding)
    move_mail(a.prefetch.layer, boxes, 0, warp - roles.finding, lane);
  else if (warp < roles.scanning)
    scan(a, shared, group, warp * groups + group, roles.scanning * groups, lane);
  else if (warp < judges)
    judge(a, shared, group * roles.judging + warp - roles.scanning, groups * roles.judging, lane);
  else
    post_all(a, shared, boxes, roles, group, lane);
}
