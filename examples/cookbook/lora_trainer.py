"""Hugging Face's Trainer with LoRA: the adapters travel, and PEFT loads what the session exports.

python lora_trainer.py

The frozen model is made here, and small; one's own comes from a folder that every site has.
"""

import threading

import numpy as np
import safetensors.torch
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import xain

SITES = ("north", "east")
LENGTH, WORDS = 6, 20
ONE_AT_A_TIME = threading.Lock()  # the Trainer has state that all threads of a process share

# --- data, model and training, as without federation ---


def load(part):
    """Texts as numbers of words. A text is of class 1 if its first word is of the first half."""
    words = np.random.default_rng(part).integers(0, WORDS, (160, LENGTH))
    classes = (words[:, 0] < WORDS // 2).astype(int)
    rows = zip(torch.tensor(words), torch.tensor(classes), strict=True)
    return [{"input_ids": ids, "labels": label} for ids, label in rows]


def make_model():
    torch.manual_seed(0)  # the frozen part must be the same at every site
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=2,
    )
    adapters = LoraConfig(
        task_type="SEQ_CLS", r=8, lora_alpha=32, target_modules=["query", "value", "dense"]
    )
    return get_peft_model(BertForSequenceClassification(config), adapters)


def arguments(epochs, folder):
    return TrainingArguments(
        folder,
        num_train_epochs=epochs,
        learning_rate=0.01,
        per_device_train_batch_size=16,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        logging_strategy="no",
    )


def accuracy(model, rows):
    model.eval()
    with torch.no_grad():
        scores = model(torch.stack([row["input_ids"] for row in rows])).logits
    return (scores.argmax(1) == torch.stack([row["labels"] for row in rows])).float().mean().item()


# --- at a site ---


def site(number, coordinator, model):
    rows = load(number)
    for round in xain.rounds(model, id=SITES[number], coordinator=coordinator):
        model.load_state_dict(round.weights)
        options = arguments(round.config.epochs, SITES[number])
        with ONE_AT_A_TIME:  # sites of their own need no lock
            loss = Trainer(model, options, train_dataset=rows).train().training_loss
        round.submit(model, samples=len(rows), metrics={"loss": loss})


# --- at the server ---


def main():
    model, test = make_model(), load(len(SITES))
    with xain.session(
        model,
        rounds=4,
        epochs=2,
        min_participants=len(SITES),
        address="127.0.0.1:0",
    ) as session:
        for number in range(len(SITES)):
            args = (number, session.address, make_model())
            threading.Thread(target=site, args=args, daemon=True).start()
        for round in session:
            record = round.run()
            model.load_state_dict(record.weights)
            record.evaluate(accuracy=accuracy(model, test), samples=len(test))
    session.export("adapter.safetensors")
    fresh = make_model()
    set_peft_model_state_dict(fresh, safetensors.torch.load_file("adapter.safetensors"))
    print(f"accuracy {accuracy(fresh, test):.3f} of the adapter as PEFT loads it")


if __name__ == "__main__":
    main()
